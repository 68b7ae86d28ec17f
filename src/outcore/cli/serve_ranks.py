"""``outcore serve`` on several machines: the first rank has the server, the others compute what it tells them."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..monitoring.publisher import staying

if TYPE_CHECKING:
    from outcore_cluster.link.ranks import RankGroup

    from ..serve.service import ServiceOptions


def ranks_of(args: argparse.Namespace) -> RankGroup | None:
    """The ranks that share the model; None: there is one machine."""
    ranks: RankGroup | None = getattr(args, "ranks", None)
    return ranks if ranks is not None and ranks.link.size > 1 else None


def check_shared(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse what is not shared: a model that is loaded because a client asks for it would end all ranks where one of
    them has no room for it.

    Raises:
        UsageError: there is not one model alone.
    """
    if len(names) != 1:
        raise UsageError("one model over several machines; give --model once")


def follow_first(names: Sequence[str], revision: str | None, options: ServiceOptions) -> None:
    """Compute what the first rank says, until it ends. Ctrl-C is that one's to hear.

    Raises:
        LinkError: the run has failed. OutcoreError: this rank cannot go on.
    """
    from outcore_cluster.leading import follow

    from ..decode.continuous import Continuous
    from ..loading.loader import load_model
    from ..monitoring import publish
    from ..serve.shelf import Shelf

    offered = Shelf(names, revision=revision).default
    with _uninterrupted(), staying("serve"):
        model, _ = load_model(offered.folder, options.load)
        with model.outcore:
            publish(model, "serve", offered.name)
            step, drafted = options.load.prefill_step_size, options.draft_tokens
            follow(model, Continuous(model, most=options.most, prefill_step=step, draft_tokens=drafted))


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """What starts ranks in a terminal's foreground has the terminal interrupt all of them."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
