"""How many slots does read-ahead need?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

VARIANTS: Variants = {f"{n} slots": {"resident": 0, "slots": n} for n in (2, 3, 4, 6, 8)}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "03_slots", VARIANTS, lambda rows: against(rows, "3 slots")))
