"""Pretraining: configuration, recipes and the loop."""
