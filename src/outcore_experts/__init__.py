"""Routed experts that are read one by one when tokens use them. Joins the core at ``outcore.engine.extensions``."""
