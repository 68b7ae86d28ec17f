"""Tokens that are drafted, and verified by the model in one forward pass."""
