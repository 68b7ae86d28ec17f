"""Measures this machine: its disk, its device, and how long a model's layers take."""
