"""What was computed of a text, kept beyond it: on disk, by what it was computed from."""
