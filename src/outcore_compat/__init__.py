"""Compatibility: mlx-lm's own programs, mlx-flash, LM Studio, and Ollama's Modelfiles."""
