"""At half of the layers resident: does it matter which half?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

VARIANTS: Variants = {
    "even": {"resident": 16},
    "first": {"resident": 16, "placement": "first"},
    "last": {"resident": 16, "placement": "last"},
    "interleaved": {"resident": 16, "placement": "interleaved"},
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "02_placement", VARIANTS, lambda rows: against(rows, "even")))
