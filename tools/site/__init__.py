"""The documentation site: pages of ``docs``, and a reference written from the registries.

``python -m tools.site`` assembles the pages in a working folder, builds them with Zensical and
checks every link of the result. Nothing of the reference is written by hand.
"""
