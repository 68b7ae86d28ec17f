"""The values that flags of ``outcore bench`` and ``outcore matrix`` take. Light, as ``outcore --help`` imports it."""

from __future__ import annotations

AUTO = "auto"

OUTCORE = "outcore"

WAYS = {
    "mlx-lm": "mlx-lm's own loop, everything resident",
    "plain": "naive streaming: load, compute and release layer by layer",
    OUTCORE: "Outcore at each budget",
}

IO = ("direct", "cached")
"""A matrix's ways of reading by default."""

BUDGETS = 5
"""The number of budgets of a matrix by default."""
