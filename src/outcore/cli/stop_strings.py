"""Strings that end an answer of ``stream_generate``, and are not part of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace

from mlx_lm.generate import GenerationResponse

from ..serve.parsing import Stopper


def until_stop(responses: Iterator[GenerationResponse], stops: Sequence[str]) -> Iterator[GenerationResponse]:
    """The same responses up to the first of these strings, without it; ``finish_reason`` is ``stop`` then.

    Text that a stop string may begin with comes later, when it is known that it does not.
    """
    stopper = Stopper(stops)
    with closing(responses):  # type: ignore[type-var]
        for response in responses:
            text = stopper.feed(response.text)
            if stopper.found is not None:
                yield replace(response, text=text, finish_reason="stop")
                return
            yield replace(response, text=text + (stopper.finish() if response.finish_reason is not None else ""))
