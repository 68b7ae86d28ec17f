"""Being watched, in tests: a folder for snapshots, and snapshots made up."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest


@contextmanager
def own_folder() -> Iterator[Path]:
    """Where this test's processes are found; nobody else's are."""
    base = Path(tempfile.mkdtemp(prefix="oc"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outcore.monitoring.publisher.runtime_folder", lambda: base / "outcore")
        patch.setenv("OUTCORE_MONITOR", "on")
        yield base / "outcore"
    shutil.rmtree(base)


def until(true: Callable[[], Any], seconds: float = 60.0) -> Any:
    """What ``true`` returns as soon as it is something; an error if it never is."""
    end = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.01)
    return found


def made_up(**changes: Any) -> dict[str, Any]:
    """A snapshot of a model of 8 layers."""
    model = {
        "name": "tiny [b]model[/b]",
        "state": "working",
        "layers": "mmcrlddm",
        "head": "d",
        "resident_layers": 3,
        "streamed_layers": 5,
        "shed_layers": 1,
        "slots": 3,
        "context": 512,
        "memory": {
            "budget": 4_000_000_000, "planned": 3_900_000_000, "active": 3_000_000_000, "kept": 200_000_000,
            "peak": 3_500_000_000, "weights": 2_000_000_000, "slots": 900_000_000, "caches": 500_000_000,
            "activations": 300_000_000, "allocator": 200_000_000, "experts": 0,
        },
        "disk": {
            "how": "direct", "bytes": 90_000_000_000, "gbps": 3.21, "ceiling_gbps": 3.7, "stall_s": 12.34,
            "stalled": 0.25,
        },
        "tokens": {
            "made": 210, "per_s": 1.25, "per_sweep": 2.5, "sweeps": 84, "sweeps_per_s": 0.5, "sweep_s": 2.0,
            "in_sweep": 4,
        },
        "drafts": {"source": "ngram", "drafted": 200, "accepted": 126},
        "notes": ["pass 12: 1 resident layer shed: only 1.2 GB are free"],
    }  # fmt: skip
    own = {"pid": os.getpid(), "command": "chat"}
    return {"type": "snapshot", "at": 0.0, **own, "models": [model | changes]}
