"""A running model: what is streamed, what stays in memory, and what changes when memory gets short."""
