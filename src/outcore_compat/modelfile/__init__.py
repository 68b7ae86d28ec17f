"""Ollama's Modelfiles, with mlx-flash's instructions: read, checked line by line, nothing passed over."""
