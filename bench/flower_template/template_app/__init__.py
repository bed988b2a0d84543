"""An app with the structure of Flower's PyTorch quickstart; see bench/flower_rounds.py."""
