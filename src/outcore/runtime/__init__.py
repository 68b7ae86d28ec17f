"""A running model: what stands behind it, and what becomes of it when memory gets short."""
