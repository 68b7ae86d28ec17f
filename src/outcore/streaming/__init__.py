"""Sweeps over the units of a model whose weights are read as it computes."""
