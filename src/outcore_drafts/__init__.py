"""Drafts that need weights: draft models, low-bit copies of the model itself, multi-token-prediction heads.

``drafts`` lists them for the core (``outcore.decode.speculative.sources``).
"""
