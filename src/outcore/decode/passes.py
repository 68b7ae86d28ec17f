"""Forward passes of a text's model over its caches: a prompt, or a token.

mlx-lm's own loop reads a prompt in chunks, its last token apart, and looks one step ahead: three sweeps before the
first token and one after the last. Here the same chunks, so the same bits, share one sweep.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache

from ..engine.session import Session
from ..engine.transport import sweeps_of
from ..engine.undo import Undo
from ..errors import UsageError
from ..machine.allocator import clear_cache, note_held
from ..machine.device import on_cpu
from ..machine.interrupts import check
from ..modules.call_values import caches_in, flat, handles

MLX_LM_STEP = 2048
"""Tokens of a prompt that mlx-lm computes at a time (``generate_step``), after which it looks whether to quantize."""


@dataclass(frozen=True)
class KvBits:
    """How mlx-lm quantizes a text's keys and values: ``kv_bits`` and what goes with it in ``generate_step``.

    Attributes:
        start: token from which it does.
        step: tokens of its chunks of a prompt, behind which it looks whether so many are there.
    """

    bits: int
    group_size: int
    start: int
    step: int


@dataclass(frozen=True)
class Pass:
    """One over so many tokens (0: many); ``run`` builds it, and returns logits (1, tokens, vocabulary)."""

    run: Callable[[], mx.array]
    tokens: int


class HiddenKeeper(Protocol):
    """Keeps the last hidden states of a text's tokens, (1, tokens, hidden), for what drafts from them.

    Attributes:
        arrays: what it holds, to be evaluated with the pass that made it.
        end: the token behind the last one whose state was seen. ``window``: tokens whose states it keeps.
    """

    end: int
    window: int

    @property
    def arrays(self) -> list[mx.array]: ...

    def expect(self, tokens: int) -> None:
        """A prompt is computed that ends before this token."""

    def watch(self, first: int, tokens: int) -> AbstractContextManager[None]:
        """Keep the states of a pass over so many tokens from ``first`` on, which is built inside."""

    def settle(self) -> None:
        """What is held was evaluated."""

    def cut(self, end: int) -> None:
        """Forget the states of tokens from this one on: they are not part of the text."""


class ForwardPasses:
    """A model and its caches, token by token or a prompt to a sweep.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``; what it holds already stays.
        owned: somebody else goes on with the caches, so whatever fails they are what they were before it.
        kv: how keys and values are quantized; None: they are not.
        hidden: keeps the last hidden states of the text's tokens; None: nobody wants them.

    Attributes:
        prompt_s: seconds that the prompt took; 0 before it.
        in_cache: tokens that went into the caches, of the prompt and then of the text.
    """

    def __init__(
        self,
        model: nn.Module,
        session: Session,
        cache: list[Any],
        *,
        owned: bool = False,
        kv: KvBits | None = None,
        hidden: HiddenKeeper | None = None,
    ) -> None:
        self.cache = cache
        self.hidden = hidden
        self.prompt_s = 0.0
        self.in_cache = 0
        self._model = model
        self._session = session
        self.transport = session.transport
        self.owned = owned
        self._kv = kv
        self._undo: Undo | None = None  # of a model that is all in memory

    @property
    def resident(self) -> bool:
        """Whether nothing is streamed now."""
        return self._session.streaming is None

    @contextmanager
    def transaction(self, tokens: int) -> Iterator[Undo | None]:
        """A sweep over so many tokens and what is made of it: all of it, or the caches are as they were before.

        Yields:
            what takes the caches back later, until the next sweep begins; None where nobody goes on with them.
        """
        streaming, cache = self._session.streaming, self.cache if self.owned else None
        before = self.in_cache
        try:
            if streaming is not None:
                with streaming.transaction(cache, tokens) as undo:
                    yield undo
            else:
                with self._resident_transaction(cache, tokens) as undo:
                    yield undo
        except BaseException:
            self.in_cache = before
            if self.hidden is not None:
                self.hidden.cut(before)
            raise

    @contextmanager
    def _resident_transaction(self, cache: list[Any] | None, tokens: int) -> Iterator[Undo | None]:
        undo = self._undo = Undo(cache, tokens) if cache else None
        self.transport.transaction(undo)
        try:
            yield undo
        except BaseException:
            if undo is not None:
                undo.restore()
            raise
        finally:
            self._undo = None
            self.transport.transaction(None)

    def prompting(
        self,
        ids: mx.array,
        step: int,
        embeddings: mx.array | None = None,
        passed: Callable[[int], object] = lambda _: None,
    ) -> list[Pass]:
        """The passes over a prompt, which others may share; ``prompted`` is to be told what the last one puts
        out. Of a prompt whose first tokens the caches hold already (``in_cache``) the ids are the others.

        Args:
            ids: int32 (tokens,). ``embeddings``: (tokens, hidden), instead.
            step: tokens of a chunk.
            passed: called when a chunk's graph was built, with the tokens of the prompt up to there, before keys and
                values are quantized behind it.
        """
        total, held, kv = len(ids) if embeddings is None else len(embeddings), self.in_cache, self._kv
        if self.hidden is not None:
            self.hidden.expect(held + total)
        return [
            Pass(
                functools.partial(
                    self._chunk,
                    ids[part],
                    None if embeddings is None else embeddings[part],
                    at=held + part.start,
                    quantize=kv is not None and ((held + part.stop) % kv.step == 0 or part.stop >= total - 1),
                    built=functools.partial(passed, part.stop),
                ),
                part.stop - part.start,
            )
            for part in chunks(total, step, None if kv is None else kv.step)
        ]

    def prompted(self, logits: mx.array, total: int, seconds: float) -> mx.array:
        """Logits (1, vocabulary) behind a prompt, of what its last pass put out; it had so many tokens, and took so
        long."""
        began = time.perf_counter()
        self.evaluate(logits)
        clear_cache()
        self.in_cache += total
        self.prompt_s = seconds + time.perf_counter() - began
        return logits[:, -1, :]

    @property
    def context(self) -> int:
        """Tokens that the caches hold: whoever goes on with a text gives its caches, and ``in_cache`` begins with what
        is new."""
        offsets = [c.offset for c in flat(self.cache) if isinstance(getattr(c, "offset", None), int)]
        return max([self.in_cache, *offsets])

    def step(self, token: int) -> mx.array:
        """Logits (1, vocabulary) after one more token, not evaluated."""
        return self.forward_pass(mx.array([token], dtype=mx.int32))

    def forward_pass(self, token: mx.array) -> mx.array:
        """The same for a token of shape (1,) that need not be evaluated either, where everything is resident."""
        logits = self._forward(token, None, at=self.in_cache)
        self.in_cache += 1
        return logits[:, -1, :]

    def attempt(self, token: mx.array) -> tuple[mx.array, Callable[[], None]]:
        """Logits (1, vocabulary) after a token (1,), and what takes it back, where everything is resident."""
        before, undo = self.in_cache, Undo(self.cache, 1) if self.owned else None

        def back() -> None:
            self.in_cache = before
            if undo is not None:
                undo.restore()

        try:
            logits = self.forward_pass(token)
        except BaseException:
            back()
            raise
        if undo is not None:
            undo.passed()
        return logits, back

    def drain(self) -> None:
        """Give slots back whose weights were computed with, so that reading goes on while a token is looked at."""
        if (streaming := self._session.streaming) is not None:
            streaming.drain()

    def evaluate(self, *logits: mx.array) -> None:
        """These, and what the passes so far left behind."""
        mx.eval(logits, handles(*self.cache), [] if self.hidden is None else self.hidden.arrays)
        note_held()
        if self.hidden is not None:
            self.hidden.settle()

    def _chunk(self, ids: mx.array, embeddings: mx.array | None, *, at: int, **how: Any) -> mx.array:
        """A pass of a prompt. Of all but the last only what they leave behind is computed: hidden states with it."""
        held = None if self.hidden is None else self.hidden.end
        logits = self._forward(ids, embeddings, at=at, **how)
        streaming = self._session.streaming
        if self.hidden is not None and self.hidden.end != held and streaming is not None:
            streaming.leaves(self.hidden.arrays[-1])
        return logits

    def _forward(
        self,
        ids: mx.array,
        embeddings: mx.array | None,
        *,
        at: int,
        quantize: bool = True,
        built: Callable[[], object] = lambda: None,
    ) -> mx.array:
        extra = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        # Which tokens embeddings are of is not known, so nothing could be drafted from their states.
        hidden = self.hidden if embeddings is None else None
        try:
            with contextlib.nullcontext() if hidden is None else hidden.watch(at, ids.size):
                logits: mx.array = self._model(ids[None], cache=self.cache, **extra)
        except (AttributeError, TypeError, ValueError) as e:
            if not any(isinstance(c, QuantizedKVCache) for c in caches_in(self.cache)):
                raise
            raise UsageError(
                "kv_bits: mlx-lm does not compute this model's attention with quantized keys and values; leave it out"
            ) from e
        built()
        if quantize and (kv := self._kv) is not None:
            try:
                maybe_quantize_kv_cache(self.cache, kv.start, kv.group_size, kv.bits)
            except NotImplementedError as e:
                raise UsageError("kv_bits: mlx-lm cannot quantize this model's sliding windows; leave it out") from e
        if self._undo is not None:
            self._undo.passed()
        return logits


def run_passes(
    session: Session,
    passes: Sequence[Pass],
    wanted: Collection[int],
    between: Callable[[int, Sequence[mx.array]], object],
    *,
    prompts: int = 0,
    context: int = 0,
) -> list[mx.array]:
    """What the ``wanted`` of some passes put out, by their numbers: layer by layer over all passes where weights are
    streamed, so that they are read once; else one after the other.

    Args:
        between: called behind passes that are not the last, with how many there were, and what the newest of them put
            out that is wanted: it evaluates that and what they left behind. What is queued all at once needs memory all
            at once.
        prompts: the first so many are of prompts, which share a sweep as far as there is memory for their graphs;
            ``context``: tokens that the longest of them has, with all before it.
    """
    sweeps, rows = sweeps_of(session.streaming, session.transport), list[mx.array]()
    if sweeps is None or (len(passes) == 1 and not prompts):
        # Such a model's graph cannot be built ahead of its weights, or it has none to read.
        for n, each in enumerate(passes, 1):
            row = [each.run()]
            if n - 1 not in wanted:
                row.clear()  # what nobody wants would hold what it is made from, caches above all
            rows += row
            if n < len(passes):
                between(n, row)
                check()
        return rows
    counts = [0]
    if prompts:
        lengths = [each.tokens for each in passes[:prompts]]
        counts = list(session.transport.numbers(lambda: session.size.graph(on_cpu()).sweeps(lengths, context)))
    counts[-1] += len(passes) - prompts
    at = 0
    for count in counts:
        share, mine = passes[at : at + count], [n - at for n in wanted if at <= n < at + count]
        made = sweeps.sweep(
            [each.run for each in share], tokens=sum(each.tokens for each in share) or None, wanted=mine
        )
        rows += made
        at += count
        if at < len(passes):
            between(at, made)
    return rows


def chunks(total: int, step: int, within: int | None = None) -> list[slice]:
    """mlx-lm's cut of a prompt: ``step`` tokens at a time, and the last token by itself.

    Args:
        within: tokens of longer chunks that none of these may pass the end of.
    """
    long = within or max(total, 1)
    ends = [*range(long, total - 1, long), max(0, total - 1)]
    parts = [
        slice(a, min(a + step, end))
        for begin, end in zip([0, *ends[:-1]], ends, strict=True)
        for a in range(begin, end, step)
    ]
    return [*parts, slice(total - 1, total)]
