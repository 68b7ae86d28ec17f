"""Does a least-recently-used cache of layers save reads in a cyclic scan, where pinning a fixed set does?"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

RESULT = Path(__file__).parents[1] / "results/experiments/01_lru.json"


def lru_hits(order: Sequence[int], room: int, sweeps: int) -> float:
    """Share of uses found in a cache of ``room`` units, after the first sweep."""
    cache: OrderedDict[int, None] = OrderedDict()
    hits = uses = 0
    for sweep in range(sweeps):
        for unit in order:
            if sweep:
                uses += 1
                hits += unit in cache
            cache.pop(unit, None)
            cache[unit] = None
            if len(cache) > room:
                cache.popitem(last=False)
    return hits / uses


def main() -> int:
    rows = [
        {"layers": n, "room": room, "lru_hits": lru_hits(range(n), room, 20), "pinned_hits": room / n}
        for n in (16, 32, 64)
        for room in (n // 4, n // 2, 3 * n // 4, n - 1)
    ]
    for r in rows:
        print(f"{r['layers']} layers, room for {r['room']}: LRU {r['lru_hits']:.0%}, pinned {r['pinned_hits']:.0%}")
    best = max(r["lru_hits"] for r in rows)
    verdict = f"LRU finds {best:.0%} at best below the whole; pinning finds its share. Pin."
    print(verdict)
    question = __doc__ or ""
    RESULT.write_text(
        json.dumps({"schema": "outcore-experiment/1", "question": question, "rows": rows, "verdict": verdict}, indent=1)
        + "\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
