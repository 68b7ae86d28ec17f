"""Where people already are: mlx-lm's own programs, and those who come from mlx-flash and LM Studio."""
