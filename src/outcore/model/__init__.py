"""A model on disk, and as modules of mlx-lm."""
