"""What do attention and MLP as units of their own cost in time, and save in slots, against whole layers?"""

from __future__ import annotations

import sys

from harness import Variants, against, run

VARIANTS: Variants = {
    "layers": {"resident": 0},
    "layers, 2 slots": {"resident": 0, "slots": 2},
    "sub-layers": {"resident": 0, "units": "sublayers"},
    "sub-layers, 2 slots": {"resident": 0, "units": "sublayers", "slots": 2},
}

if __name__ == "__main__":
    sys.exit(run(__doc__ or "", "07_sublayers", VARIANTS, lambda rows: against(rows, "layers")))
