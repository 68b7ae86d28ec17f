"""Drafters as they are published: small networks that read the hidden states of a model's layers and guess its next
tokens. Which kind a folder holds comes from its ``config.json``."""
