"""Several machines: ranks that share a model, and the links between them."""
