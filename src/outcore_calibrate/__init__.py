"""Measures what this machine does: its disk, its device, and how long a model's layers take."""
