"""Their flags: what help is made of, without MLX."""
