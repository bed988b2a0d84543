"""How a round is computed: engines, and what makes them fast."""
