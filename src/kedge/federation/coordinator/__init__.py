"""The server of a federation: who takes part, what is asked, what is believed."""
