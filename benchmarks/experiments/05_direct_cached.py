"""Around the page cache or through it, when the files are cold; and what does a warm cache give?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

VARIANTS: Variants = {
    "direct": {"resident": 0, "io": "direct"},
    "cached, cold at first": {"resident": 0, "io": "cached"},
    "cached, warm": {"resident": 0, "io": "cached", "warm": True},
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "05_direct_cached", VARIANTS, lambda rows: against(rows, "direct")))
