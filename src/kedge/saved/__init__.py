"""A trained model in use: its bundle, its predictions, its metrics, and its export."""
