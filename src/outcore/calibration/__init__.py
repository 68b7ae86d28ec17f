"""Measurements of this machine, stored and looked up."""
