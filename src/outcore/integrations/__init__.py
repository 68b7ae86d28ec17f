"""The names by which programs know ``outcore_compat``: ``outcore.integrations.mlx_lm`` and ``.lmstudio``."""
