"""The model of ``outcore demo``: this folder is an mlx-lm checkpoint. Found by ``outcore.model.demo_model``."""
