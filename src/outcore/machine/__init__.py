"""This machine: its memory, its devices, its processes. Knows nothing of models."""
