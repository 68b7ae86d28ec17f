"""Models of types that only mlx-vlm knows: their text, streamed as mlx-lm's models are."""
