"""``outcore serve`` on several machines: the first rank has the server, the others compute what it tells them."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import UsageError
from ..monitoring.publisher import staying
from ..planning.draft_cost import AUTO, NGRAM, NONE

if TYPE_CHECKING:
    from ..link.ranks import Ranks
    from ..serving.service import ServiceOptions


def ranks_of(args: argparse.Namespace) -> Ranks | None:
    """The ranks that share the model; None: there is one machine."""
    ranks: Ranks | None = getattr(args, "ranks", None)
    return ranks if ranks is not None and ranks.link.size > 1 else None


def check_shared(args: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse what is not shared: a model that is loaded because a client asks for it would end all ranks where one of
    them has no room for it.

    Raises:
        UsageError: there is not one model alone.
    """
    if args.models_folder is not None or len(names) != 1:
        raise UsageError("one model over several machines; give --model once, and no --models-folder")


def draft_on_ranks(draft: str) -> str:
    """What drafts for a text alone. A copy that drafts has caches of others' layers filled on the first rank, which
    could not be put together with those of sequences that it did not draft for.

    Raises:
        UsageError: something else was asked for.
    """
    if draft not in (AUTO, NGRAM, NONE):
        raise UsageError(f"--draft {draft}: in serve over several machines only ngram drafts")
    return NGRAM if draft == AUTO else draft


def follow_first(names: Sequence[str], revision: str | None, options: ServiceOptions) -> None:
    """Compute what the first rank says, until it ends. Ctrl-C is that one's to hear.

    Raises:
        LinkError: the run has failed. OutcoreError: this rank cannot go on.
    """
    from ..generation.continuous import Continuous
    from ..generation.leading import follow
    from ..loading.loader import load_model
    from ..monitoring import publish
    from ..serving.shelf import Shelf

    offered = Shelf(names, None, revision=revision).default
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
