"""Finds, traces and wraps mlx-lm's layers and caches."""
