"""Computed prompts, kept on disk."""
