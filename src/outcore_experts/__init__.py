"""Routed experts that are read one by one as tokens use them. They join the core at ``outcore.engine.extensions``."""
