"""Which size of a read, and how many in flight, read fastest into slots while the model computes?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

MIB = 1 << 20
CHOICES = [(4, 8), (1, 8), (2, 8), (8, 8), (4, 2), (4, 32), (1, 128)]
VARIANTS: Variants = {f"{t} × {c} MiB": {"resident": 0, "threads": t, "chunk": c * MIB} for t, c in CHOICES}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "04_chunk_threads", VARIANTS, lambda rows: against(rows, "4 × 8 MiB")))
