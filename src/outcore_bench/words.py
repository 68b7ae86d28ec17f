"""The words that ``outcore bench`` and ``outcore matrix`` are given; light, for their help is made of them."""

from __future__ import annotations

AUTO = "auto"
"""The budget that Outcore chooses by itself, or its way of reading."""

OUTCORE = "outcore"

WAYS = {
    "mlx-lm": "mlx-lm's own loop on its own load, everything resident",
    "plain": "the plain way: load, compute and release layer by layer",
    OUTCORE: "Outcore within each budget",
}
"""The ways of running a model that are measured side by side (``modes``), and what each is."""

IO = ("direct", "cached")
"""Ways of reading that a matrix has where none are given."""

BUDGETS = 5
"""Budgets that a matrix has where none are given."""
