"""A sequence that nobody shares sweeps with: with drafts, and looking ahead where everything is in memory."""

from __future__ import annotations

import functools
from collections.abc import Collection, Generator, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from ..engine.kept_tokens import in_memory
from ..engine.session import Session
from .batch_engine import Request, Token, own_cache, to_token
from .generate_step import generate_step
from .one_text import OneText, drafting_of
from .prompt import cached_tokens


class Alone:
    """One sequence at a time, as ``generate`` writes it.

    Args:
        ends: tokens that end a text: nothing is drafted behind them.
        prefill_step: tokens of a prompt computed at a time.
        most: tokens drafted for a sweep at most; None: as many as are worth it.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        *,
        ends: Collection[int],
        prefill_step: int,
        most: int | None = None,
    ) -> None:
        self._model, self._session, self._ends, self._most = model, session, ends, most
        self.prefill_step = prefill_step
        self._request: Request | None = None
        self._cache: list[Any] = []
        self._held = 0  # tokens of the request's prompt and answer that the cache holds, when it has ended
        self._tokens: Generator[tuple[int, mx.array, bool], None, None] | None = None

    def step(self, joining: Sequence[Request]) -> list[Token]:
        for request in joining:
            self._request, self._cache = request, own_cache(self._model, request)
            self._tokens = self._run(request)
        assert self._tokens is not None and self._request is not None
        token, logprobs, _ = next(self._tokens)
        return [to_token(self._request, int(token), logprobs)]

    def _run(self, request: Request) -> Generator[tuple[int, mx.array, bool], None, None]:
        session = self._session
        drafting, most = (None, 0) if self._most == 0 else drafting_of(session, {"num_draft_tokens": self._most})
        held = max(len(request.earlier), cached_tokens(self._cache))
        text = OneText(session, held, drafting, most, (), request.sampler, self._ends)

        def counted(tokens: int) -> None:
            self._held = tokens

        return generate_step(
            mx.array(list(request.tokens), dtype=mx.int32),
            self._model,
            functools.partial(getattr, session, "streaming"),
            max_tokens=request.max_tokens,
            prefill_step_size=self.prefill_step,
            sampler=request.sampler,
            logits_processors=list(request.processors),
            prompt_cache=self._cache,
            leave_last=True,
            # What is drawn ahead in memory is taken back where the sequence goes on with others.
            private=session.streaming is not None,
            draws_ahead=False,
            earlier=request.earlier,
            known=request.known,
            goes_on=lambda: False,
            reserve=text.reserve,
            speculation=text.speculation,
            counted=counted,
            hidden=text.hidden(),
        )

    def take_out(self) -> tuple[list[Any], int]:
        """End the sequence; its caches, and how many tokens of its prompt and answer they hold: all but the last, or
        fewer where drafted tokens had to be taken back."""
        assert self._tokens is not None
        self._tokens.close()
        in_memory(self._cache)
        cache, self._tokens, self._request, self._cache = self._cache, None, None, []
        return cache, self._held

    def remove(self, uids: Sequence[int]) -> None:
        if self._request is not None and self._request.uid in uids:
            self.close()

    def close(self) -> None:
        if self._tokens is not None:
            self._tokens.close()
        self._tokens, self._request, self._cache = None, None, []
