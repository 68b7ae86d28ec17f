"""Keys and values on disk: KV offload, which joins the core at ``outcore.engine.extensions``."""
