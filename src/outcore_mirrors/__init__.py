"""Mirrors: copies of a model's folder on other disks, read together with it so that the disks' rates add up."""
