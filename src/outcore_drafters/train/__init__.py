"""Trains a drafter in EAGLE-3's form on a model's own continuations of given text."""
