"""Speculative decoding: proposers draft tokens, and the model verifies them in one forward pass."""
