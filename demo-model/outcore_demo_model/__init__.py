"""The model of ``outcore demo``: this folder is an mlx-lm checkpoint. Found by ``outcore.checkpoint.demo_model``."""
