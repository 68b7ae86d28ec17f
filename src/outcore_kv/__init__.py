"""KV offload: keys and values of a text kept on disk. Joins the core at ``outcore.engine.extensions``."""
