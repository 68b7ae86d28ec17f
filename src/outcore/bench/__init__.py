"""Measuring: one JSON document a run, and what is drawn from it."""
