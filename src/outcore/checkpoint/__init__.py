"""Weights on disk, as they were published and as Outcore packs them; and models opened without reading them."""
