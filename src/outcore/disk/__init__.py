"""From files to slots: bytes and ranges, never a model."""
