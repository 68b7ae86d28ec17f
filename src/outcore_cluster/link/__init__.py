"""Moves bytes between the ranks of a model that several machines share; no MLX, no models."""
