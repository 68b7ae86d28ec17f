"""Tokens that are drafted, and judged by the model in one sweep."""
