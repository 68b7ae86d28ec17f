"""Does it help to hand the device the next layer before waiting for the one before, against a wait at every layer?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

VARIANTS: Variants = {
    "lag 1": {"resident": 0},
    "strict": {"resident": 0, "lag": 0},
    "lag 2": {"resident": 0, "lag": 2, "slots": 4},
    "lag 1, warm": {"resident": 0, "io": "cached", "warm": True},
    "strict, warm": {"resident": 0, "lag": 0, "io": "cached", "warm": True},
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "06_sync", VARIANTS, lambda rows: against(rows, "lag 1")))
