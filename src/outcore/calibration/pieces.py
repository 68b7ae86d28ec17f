"""What a layer takes more where its pieces are computed one by one, as they are where parts of it are streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import mlx.core as mx

from ..engine.model_profile import ModelProfile
from ..machine.neighbours import Neighbours, undisturbed
from ..modules.hooks import arrays_in, swap, unswap
from .random_model import Rig, TimedPass

TURNS, QUIET_TURNS, MOST_TURNS = 4, 2, 8
"""Turns of layers whole and in pieces, of which so many have to be undisturbed; and turns at most, to get them."""

SAMPLES = 6
"""Layers of each kind in a turn, as far as there are."""

PIECES_S = 2.5
"""Seconds after which no further turn begins."""

LEAST_S = 1e-7
"""What is said where nothing was found."""


def part_seconds(
    made: Rig, sync_s: float, *, budget_s: float = PIECES_S, neighbours: Neighbours | None = None
) -> dict[str, float]:
    """Seconds that each part costs beside computing and ``sync_s``, by kind of layer, for one token; of kinds that can
    be streamed in parts. Each is handed over and waited for before the next one is built: of a ring that waits for the
    disk it is what happens, and one that does not hides some of it. Empty where others never leave the machine alone:
    it is the difference of two times that are nearly the same."""
    size = made.profile.size
    pieces = {layer.kind: len(layer.pieces) for layer in size.layers if layer.splittable and len(layer.pieces) > 1}
    if not pieces:
        return {}
    watched = neighbours or Neighbours()
    whole: list[TimedPass] = []
    apart: list[TimedPass] = []
    loads: list[float | None] = []
    deadline = made.clock() + budget_s
    watched.lap()
    while len(loads) < MOST_TURNS and (len(loads) < TURNS or len(undisturbed(loads)) < QUIET_TURNS):
        if loads and made.clock() > deadline:
            break
        whole.append(made.watched(1, _enough(pieces)))
        with one_by_one(made.profile):
            apart.append(made.watched(1, _enough(pieces)))
        loads.append(watched.lap())
    quiet = undisturbed(loads)
    if len(quiet) < QUIET_TURNS:
        return {}
    found = {}
    for kind, count in pieces.items():
        together, single = ([s for turn in quiet for s in passes[turn].layers[kind]] for passes in (whole, apart))
        if together and single:
            found[kind] = max(LEAST_S, (median(single) - median(together)) / count - sync_s)
    return found


def _enough(kinds: dict[str, int]) -> Callable[[TimedPass], bool]:
    return lambda seen: all(len(seen.layers[kind]) >= SAMPLES for kind in kinds)


@contextmanager
def one_by_one(profile: ModelProfile) -> Iterator[None]:
    """Have pieces of layers that can be streamed in parts evaluated as they are called."""

    def call(original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        out = original(*args, **kwargs)
        mx.eval(arrays_in(out))
        return out

    modules = [
        piece.module
        for pieces, layer in zip(profile.pieces, profile.size.layers, strict=True)
        if layer.splittable
        for piece in pieces
    ]
    for module in modules:
        swap(module, "Timed", call)
    try:
        yield
    finally:
        for module in modules:
            unswap(module)
