"""What running a mixture of experts has shown of it: how many uses pools of several sizes find. Kept in the cache
folder for the next plan, by the model's identity."""

from __future__ import annotations

import contextlib
import json
import weakref
from dataclasses import replace
from pathlib import Path

from ..engine.session import Session
from ..errors import StoreError
from ..machine.cache_folder import cache_dir, keep_document, require_own
from ..machine.small_files import read_small
from ..plan.expert_curve import SHARES, curve_of
from ..plan.model_size import ModelSize

SCHEMA = 1
FOLDER = "experts"
LEAST, MOST = 2_000, 200_000
"""Uses that say enough, and those that what was seen before counts for at most."""

FILE_BYTES = 10_000

Counts = tuple[int, list[int]]
"""Uses, and hits at each of ``SHARES``."""


def file_of(identity: str) -> Path:
    """Where a model's is kept."""
    return cache_dir() / FOLDER / f"{identity[:16]}.json"


def known_counts(identity: str) -> tuple[Counts | None, str | None]:
    """What was kept for a model; and what is wrong with it, in words, if it is not used for that."""
    path = file_of(identity)
    try:
        require_own(path.parent)
        found = json.loads(read_small(path, FILE_BYTES))
        uses, hits = found["uses"], found["hits"]
        if found["schema"] != SCHEMA or found["shares"] != list(SHARES):
            return None, None
        if found["identity"] != identity:
            return None, f"{path}: what is kept of experts is of another model, so it is ignored"
        if (
            not all(type(n) is int and 0 <= n <= uses <= 2**53 for n in (uses, *hits))
            or len(hits) != len(SHARES)
            or not uses
        ):
            raise ValueError("numbers that cannot be")
    except FileNotFoundError:
        return None, None
    except (OSError, StoreError, ValueError, KeyError, TypeError, RecursionError):
        return None, f"{path}: what is kept of experts cannot be read, so it is ignored"
    return (uses, hits), None


def with_experience(size: ModelSize, identity: str) -> tuple[ModelSize, tuple[str, ...]]:
    """A model's size by what is known of its experts, and notes."""
    if all(layer.experts is None for layer in size.layers):
        return size, ()
    counts, note = known_counts(identity)
    notes = () if note is None else (note,)
    if counts is None or counts[0] < LEAST:
        return size, notes
    curve = curve_of(*counts)
    layers = (replace(x, experts=replace(x.experts, hits=curve)) if x.experts else x for x in size.layers)
    return replace(size, layers=tuple(layers)), notes


def keep_experience(of: weakref.ref[Session], identity: str) -> None:
    """When a session is closed: add what it has seen to what is kept. Nothing is said where that cannot be written."""
    session = of()
    experts = session.streaming.experts if session is not None and session.streaming is not None else None
    seen = experts.seen() if experts is not None else None
    if seen is None or seen[0] < LEAST:
        return
    before, _ = known_counts(identity)
    uses, hits = before or (0, [0] * len(SHARES))
    fade = min(1.0, MOST / uses) if uses else 0.0
    document = {
        "schema": SCHEMA,
        "identity": identity,
        "shares": list(SHARES),
        "uses": int(uses * fade) + seen[0],
        "hits": [int(old * fade) + new for old, new in zip(hits, seen[1], strict=True)],
    }
    with contextlib.suppress(OSError, StoreError):
        keep_document(file_of(identity), document)
