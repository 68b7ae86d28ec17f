"""Reads Ollama's Modelfiles, with mlx-flash's instructions too; each line is applied or refused."""
