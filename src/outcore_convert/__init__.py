"""Conversion of models as ``mlx_lm.convert`` does it, in bounded memory."""
