"""Packed copies of whole models, and the encoded forms in which they store matrices."""
