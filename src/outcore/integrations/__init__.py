"""Import paths of ``outcore_compat`` for programs: ``outcore.integrations.mlx_lm`` and ``.lmstudio``."""
