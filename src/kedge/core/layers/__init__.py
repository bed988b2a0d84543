"""Layers that draw from keys, in place of those of torch, and modules of users that hold them."""
