"""Decodes sequences in shared caches: each step is one pass for a token of every sequence and the prompts of those that
join.

mlx-lm's ``BatchGenerator`` takes a pass for each chunk of a prompt, one for its last token and one to look ahead. Here
the chunks of a joining prompt share one reading of the weights with the next token of all others. The chunks fill a
separate cache, which the last pass merges into the shared caches before it runs. So nothing is read twice, and a prompt
has the same bits as alone. Code of mlx-lm (``models/cache.py``) pads and merges caches, and removes rows from them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream
from mlx_lm.models.cache import BatchKVCache, BatchRotatingKVCache, CacheList, TokenBuffer, make_prompt_cache
from mlx_lm.sample_utils import greedy_sampler

from ..engine.session import Session
from ..engine.transport import pass_runner
from ..machine.allocator import clear_cache, note_held
from ..modules.hooks import handles
from ..modules.side_by_side import own_memory
from ..plan.cache_size import ALL
from .media import Media, plain
from .one_text import to_token
from .passes import Pass, chunks, run_passes
from .request import Request, Token, grow_by, own_cache


@dataclass
class _Row:
    request: Request
    last: int  # its newest token, not in the caches yet
    seen: TokenBuffer | None  # all tokens, for processors
    made: int = 0  # answer tokens


class BatchDecoder:
    """Sequences that are decoded together, each in a row of shared caches and without drafts.

    Attributes:
        failed: sequences whose own sampler or processors raised in the last step, with the error; they got no token.
    """

    ready = False
    drafts: Mapping[int, tuple[int, int]] = MappingProxyType({})

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model, self._session, self._transport = model, session, session.transport
        self._rows: list[_Row] = []
        self._caches: list[Any] = []
        self.failed: dict[int, Exception] = {}

    def step(self, joining: Sequence[Request], chunk: int, extra: Sequence[Pass] = ()) -> list[Token]:
        """Computes the next token of every sequence, the ``joining`` ones included. ``chunk``: prompt tokens per chunk;
        ``extra``: passes over part of a prompt whose sequence does not join yet."""
        session, streaming = self._session, self._session.streaming
        with mx.stream(generation_stream):
            passes = [*extra]
            joined = [own_cache(self._model, request) for request in joining]
            for request, cache in zip(joining, joined, strict=True):
                # Store the computed part of the prompt now: caches of the other tokens are merged, and not stored.
                if request.cached.recording is not None:
                    request.cached.recording.save(cache, None, request.cached.tokens)
                grow_by(cache, session.size.step)
                media, begin = request.media, len(request.earlier) + request.cached.tokens
                prompt = mx.array(list(request.tokens[request.cached.tokens :]), dtype=mx.int32)
                for part in chunks(len(prompt), chunk)[:-1]:
                    run = functools.partial(self._prompt, prompt[part], cache, media, begin + part.start)
                    passes.append(Pass(run, part.stop - part.start))
                *before, last = request.tokens
                seen = TokenBuffer(plain(media, [*request.earlier, *before])) if request.processors else None
                self._rows.append(_Row(request, last, seen))
            passes.append(Pass(functools.partial(self._decode, joined), 0))
            if streaming is None:
                session.before_pass()
            # Nothing to restore: if this fails, the scheduler drops the caches.
            with contextlib.nullcontext() if streaming is None else streaming.transaction(None, 0):
                # On all ranks, as they agree on the readings.
                n, short = len(passes) - 1, session.size.reading < ALL or not self._transport.alone
                (logits,) = run_passes(session, passes, [n], lambda *_: mx.eval(handles(*joined)), prompts=n * short)
            mx.eval(logits, [c.state for c in self._caches])
            if streaming is not None:
                streaming.drain()  # frees all slots, so that reading goes on while tokens are chosen
            note_held()
            tokens = self._choose(logits[:, -1, :])
            if joining:
                clear_cache()
        return tokens

    def _prompt(self, ids: mx.array, cache: list[Any], media: Media | None, at: int) -> mx.array:
        ids, extra = (ids, {}) if media is None else media.arguments(at, ids)
        logits: mx.array = self._model(ids[None], cache=cache, **extra)
        if pass_runner(self._session.streaming, self._transport) is None:
            mx.eval([c.state for c in cache])
        return logits

    def _decode(self, joined: list[list[Any]]) -> mx.array:
        if joined:
            # Merging is lazy: a layer's caches are merged when the pass computes that layer.
            self._transport.merging([*joined, *([self._caches] if self._caches else [])])
            merged = [each[0].merge(list(each)) for each in zip(*joined, strict=True)]
            grow_by(merged, self._session.size.step)
            for cache in joined:
                # Passes that are still running refer to these lists, which would keep the arrays alive.
                cache.clear()
            for mine, theirs in zip(self._caches, merged, strict=False):
                mine.extend(theirs)
            self._caches = self._caches or merged
            if pass_runner(self._session.streaming, self._transport) is None:
                # One layer at a time, since a layer's old and new arrays are in memory together.
                for c in self._caches:
                    mx.eval(c.state)
        last = mx.array([row.last for row in self._rows], dtype=mx.int32)
        shifts = [0 if row.request.media is None else row.request.media.shift for row in self._rows]
        extra = {"rope_deltas": mx.array(shifts)[:, None]} if any(shifts) else {}
        return self._model(last[:, None], cache=self._caches, **extra)

    def _choose(self, logits: mx.array) -> list[Token]:
        """Chooses each row's next token from logits of shape (rows, vocabulary). A failed row gets no token, but an
        entry in ``failed``."""
        self.failed = {}
        if not self._transport.chooses:
            return self._chosen_elsewhere(logits)
        found: list[Token] = []
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        greedy = greedy_sampler(logprobs)
        mx.eval(greedy)
        for i, row in enumerate(self._rows):
            chosen, scores = greedy[i : i + 1], logprobs[i : i + 1]
            try:
                if row.request.processors:
                    assert row.seen is not None
                    seen = row.seen.update_and_fetch(mx.array([row.last], dtype=mx.int32))
                    processed = logits[i : i + 1]
                    for process in row.request.processors:
                        processed = process(seen, processed)
                    scores = processed - mx.logsumexp(processed, axis=-1, keepdims=True)
                    chosen = greedy_sampler(scores)
                if row.request.sampler is not None:
                    chosen = row.request.sampler(scores)
                row.last = int(chosen.item())
                found.append(to_token(row.request, row.last, scores[0]))
            except Exception as e:  # fails this sequence only; the likeliest token stands in
                self.failed[row.request.uid], row.last = e, cast(int, greedy[i].item())
            row.made += 1
        self._transport.numbers(lambda: [row.last for row in self._rows])
        return found

    def _chosen_elsewhere(self, logits: mx.array) -> list[Token]:
        tokens = self._transport.numbers(list)
        for row, token in zip(self._rows, tokens, strict=True):
            row.last, row.made = token, row.made + 1
        return [to_token(row.request, row.last, logits[i]) for i, row in enumerate(self._rows)]

    def remove(self, uids: Sequence[int]) -> None:
        gone = set(uids)
        keep = [i for i, row in enumerate(self._rows) if row.request.uid not in gone]
        if len(keep) == len(self._rows):
            return
        self._rows, self._caches = [self._rows[i] for i in keep], self._caches if keep else []
        with mx.stream(generation_stream):
            for c in self._caches:
                c.filter(keep)
                # One cache at a time, since its old and new arrays are in memory together.
                mx.eval(c.state)
        clear_cache()

    def take_out(self, uid: int) -> tuple[list[Any], int]:
        """Ends a sequence. Returns caches of its own, and how many tokens of its prompt and answer they hold: all but
        the last."""
        i, row = next((i, row) for i, row in enumerate(self._rows) if row.request.uid == uid)

        def own(shared: Any, fresh: Any) -> Any:
            if isinstance(shared, CacheList):
                return CacheList(*map(own, shared.caches, fresh.caches))
            # Caches of layers without attention stay empty, and mlx-lm cannot take a row out of those.
            empty = isinstance(shared, BatchKVCache | BatchRotatingKVCache) and shared.keys is None
            return fresh if empty else shared.extract(i)

        with mx.stream(generation_stream):
            caches = list(map(own, self._caches, make_prompt_cache(self._model)))
            own_memory(caches)
        # Remove the row now, so that it is not in memory twice while other rows are taken out.
        self.remove([uid])
        return caches, len(row.request.tokens) + row.made - 1

    def close(self) -> None:
        if self._session.streaming is not None:
            self._session.streaming.drain()
        self._rows, self._caches = [], []
