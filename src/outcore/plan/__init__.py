"""Numbers in, a plan out. Imports no MLX."""
