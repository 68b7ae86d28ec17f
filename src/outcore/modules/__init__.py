"""The layers and caches of mlx-lm: found, traced, and called otherwise."""
