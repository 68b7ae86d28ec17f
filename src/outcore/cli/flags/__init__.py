"""Each command's flags, one file a command: what help is made of, without MLX, which takes a second to import."""
