"""Whole packed copies of models, and forms in which they store matrices in fewer bytes, or in parts."""
