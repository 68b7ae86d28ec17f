"""Model weights on disk: as published, and packed by Outcore."""
