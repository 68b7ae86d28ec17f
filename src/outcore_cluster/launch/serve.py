"""``outcore serve`` on several machines: rank 0 runs the server, the others follow it."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outcore.cli.serve import service_options
from outcore.decode.loader import load_model
from outcore.decode.scheduler import Scheduler
from outcore.errors import UsageError
from outcore.monitoring import publish
from outcore.serve.service import ServiceOptions
from outcore.serve.shelf import Shelf

from ..leading import follow

if TYPE_CHECKING:
    from ..group import RankGroup


def serves(ranks: RankGroup, args: argparse.Namespace, names: Sequence[str]) -> bool:
    """Returns True on rank 0, which runs the server. Another rank follows rank 0 until that ends, and returns False.

    Raises:
        UsageError: several models were given. Loading one on a client's request would end all ranks if one has no room.
    """
    if len(names) != 1:
        raise UsageError("one model over several machines; give --model once")
    if ranks.link.rank:
        _follow_first(names, args.revision, service_options(args))
    return ranks.link.rank == 0


def _follow_first(names: Sequence[str], revision: str | None, options: ServiceOptions) -> None:
    """Loads the model and follows rank 0 until it ends. Ignores Ctrl-C, which rank 0 handles."""
    offered = Shelf(names, revision=revision).default
    with _uninterrupted():
        model, _ = load_model(offered.folder, options.load)
        with model.outcore:
            publish(model, "serve", offered.name)
            step, drafted = options.load.prefill_step_size, options.draft_tokens
            follow(model, Scheduler(model, most=options.most, prefill_step=step, draft_tokens=drafted))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ignores Ctrl-C: a terminal sends it to all ranks that were started in its foreground."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
