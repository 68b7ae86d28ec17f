"""On CUDA: do slots advised to stay on the host, accessed by the device, beat unadvised ones, and copies both?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

BASE = {"resident": 0, "io": "cached", "warm": True, "threads": 8}
VARIANTS: Variants = {
    "advised": BASE,
    "unadvised": BASE | {"advice": False},
    "advised, copied": BASE | {"copy_rows": 1},
    "unadvised, copied": BASE | {"advice": False, "copy_rows": 1},
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "08_cuda_advice", VARIANTS, lambda rows: against(rows, "advised")))
