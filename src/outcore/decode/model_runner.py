"""Runs a model on one text and its caches: over a prompt, the next token, or drafted tokens. Drafted tokens share one
reading of the weights; rejected ones are removed from the caches."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import maybe_quantize_kv_cache
from mlx_lm.models.cache import QuantizedKVCache

from ..engine.session import Session
from ..engine.undo import Undo
from ..errors import UsageError
from ..machine.allocator import clear_cache, note_held
from ..modules.cache_rollback import Snapshot, by_offset, snapshot_bytes
from ..modules.hooks import caches_in, flat, handles
from .passes import HiddenKeeper, KvBits, Pass, chunks, run_passes


class ModelRunner:
    """Runs a model on the caches of one text.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``; may hold tokens already.
        owned: the caller goes on with the caches, so a pass that fails restores them.
        kv: how keys and values are quantized; None: they are not.
        hidden: keeps the hidden states of the latest tokens; None: no drafter needs them.
        in_blocks: drafted tokens may be computed in one pass, which is faster where compute is the limit, but whose
            kernels may round differently; otherwise each in a separate pass, with the bits of plain decoding.
        in_cache: tokens of the prompt that the caches hold already.
        arguments: as ``Media.arguments``, with positions that count as ``in_cache``; None: passes have ids alone.

    Attributes:
        in_cache: how many tokens of this text, prompt included, the caches hold.
        pending: tokens of the text that the caches do not hold yet, without the last one.
        fed: tokens of the last verifying passes, drafted ones included.
        snapshots: bytes that may be used for cache snapshots, besides the one that is always needed.
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
        in_blocks: bool = False,
        in_cache: int = 0,
        arguments: Callable[[int, mx.array], tuple[mx.array, dict[str, Any]]] | None = None,
    ) -> None:
        self._model, self._session, self._kv = model, session, kv
        self.cache, self.owned, self.hidden = cache, owned, hidden
        self._may_block, self._arguments = in_blocks, arguments
        self.in_cache, self.snapshots = in_cache, 0
        self.pending: list[int] = []
        self._undo: Undo | None = None  # where the model is all in memory
        self.fed: list[int] = []
        self._kept: list[tuple[int, Snapshot]] = []  # cache snapshots, each after so many of ``fed``
        self._committed = 0  # tokens of ``fed`` that were part of the text already

    @contextmanager
    def transaction(self, tokens: int) -> Iterator[Undo | None]:
        """Restores ``owned`` caches if the body fails, which runs a pass over ``tokens`` tokens.

        Yields:
            the undo, which can restore the caches until the next pass begins; None: the caches are not ``owned``.
        """
        streaming, cache = self._session.streaming, self.cache if self.owned else None
        before, pending = self.in_cache, self.pending
        try:
            within = self._in_memory(cache, tokens) if streaming is None else streaming.transaction(cache, tokens)
            with within as undo:
                yield undo
        except BaseException:
            self.in_cache, self.pending, self.fed, self._kept = before, pending, [], []
            if self.hidden is not None:
                self.hidden.cut(before)
            raise

    @contextmanager
    def _in_memory(self, cache: list[Any] | None, tokens: int) -> Iterator[Undo | None]:
        undo = self._undo = Undo(cache, tokens) if cache else None
        transport = self._session.transport
        transport.transaction(undo)
        try:
            yield undo
        except BaseException:
            if undo is not None:
                undo.restore()
            raise
        finally:
            self._undo = None
            transport.transaction(None)

    def prompting(
        self,
        ids: mx.array,
        step: int,
        embeddings: mx.array | None = None,
        passed: Callable[[int], object] = lambda _: None,
    ) -> list[Pass]:
        """Returns the passes over a prompt; they may share a reading of the weights with other passes. The last one's
        output has to be given to ``prompted``.

        Args:
            ids: the prompt without the tokens that the caches hold already (``in_cache``); int32 (tokens,).
            step: tokens per chunk.
            embeddings: (tokens, hidden), used instead of the ids.
            passed: called when a chunk's graph is built, before keys and values are quantized, with the number of ids
                up to the chunk's end.
        """
        total, held = len(ids) if embeddings is None else len(embeddings), self.in_cache
        kv, hidden = self._kv, self.hidden
        if hidden is not None:
            hidden.expect(held + total)

        def run(part: slice) -> mx.array:
            quantizes = kv is not None and ((held + part.stop) % kv.step == 0 or part.stop >= total - 1)
            seen = None if hidden is None else hidden.end
            logits = self._forward(
                ids[part],
                None if embeddings is None else embeddings[part],
                at=held + part.start,
                quantizes=quantizes,
                built=functools.partial(passed, part.stop),
            )
            # Of chunks before the last, only caches and hidden states are evaluated.
            if hidden is not None and hidden.end != seen and (streaming := self._session.streaming) is not None:
                streaming.leaves(hidden.arrays[-1])
            return logits

        parts = chunks(total, step, None if kv is None else kv.step)
        return [Pass(functools.partial(run, part), part.stop - part.start) for part in parts]

    def prompted(self, logits: mx.array, total: int) -> mx.array:
        """Evaluates the output of a prompt's last pass and returns the logits (1, vocabulary) after the prompt.
        ``total``: tokens of its passes."""
        self.evaluate(logits)
        clear_cache()
        self.in_cache += total
        return logits[:, -1, :]

    @property
    def context(self) -> int:
        """Tokens in the caches, including those from before this text, which ``in_cache`` does not count."""
        offsets = [c.offset for c in flat(self.cache) if isinstance(getattr(c, "offset", None), int)]
        return max([self.in_cache, *offsets])

    def step(self, token: mx.array) -> mx.array:
        """Returns unevaluated logits (1, vocabulary) after one more ``token`` (1,)."""
        logits = self._forward(token, None, at=self.in_cache)
        self.in_cache += 1
        return logits[:, -1, :]

    def attempt(self, token: mx.array) -> tuple[mx.array, Callable[[], None]]:
        """For a resident model: returns the logits as ``step`` does, and a function that removes the token from owned
        caches."""
        before, undo = self.in_cache, Undo(self.cache, 1) if self.owned else None

        def back() -> None:
            self.in_cache = before
            if undo is not None:
                undo.restore()

        try:
            logits = self.step(token)
        except BaseException:
            back()
            raise
        if undo is not None:
            undo.passed()
        return logits, back

    @property
    def in_blocks(self) -> bool:
        """Whether drafted tokens share a pass: if that rounds differently, not where something is streamed."""
        return self._may_block and not (
            self._session.profile.rounding.rows_differ and self._session.streaming is not None
        )

    def verifying(self, token: int, drafted: Sequence[int]) -> list[Pass]:
        """Returns the passes over ``token`` and the ``drafted`` ones; they may share a reading of the weights with
        others. Their output has to be given to ``verified``, after which ``keep`` has to be called."""
        committed = [*self.pending, token]
        self.fed, self._committed = [*committed, *drafted], len(committed)
        self._kept = []
        n, total, before = self._committed, len(self.fed), self.in_cache
        asked = [len(drafted) * snapshot_bytes(self.cache) <= self.snapshots, self.in_blocks]
        # All ranks must compute the same passes, and restore the same snapshot, to compute the same tokens again.
        each, blocked = map(bool, self._session.transport.leasts(asked) if total > 1 else asked)
        if not blocked or self._will_quantize(total):
            ends = list(range(1, total + 1))
        else:
            ends = [total] if self._anywhere or not drafted else [n, total]

        def run(first: int, end: int) -> mx.array:
            logits = self._forward(mx.array(self.fed[first:end], dtype=mx.int32), None, at=before + first)
            if end == n < total or (each and n < end < total):
                self._kept.append((end, Snapshot(self.cache)))
            return logits[0, max(0, n - 1 - first) :] if end >= n else logits[0, :0]

        return [Pass(functools.partial(run, a, b), b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def verified(self, rows: Sequence[mx.array]) -> list[mx.array]:
        """Evaluates the passes' output; returns logits (1, vocabulary) after the token and after each draft token."""
        self.evaluate(*rows)
        if (streaming := self._session.streaming) is not None:
            streaming.drain()
        self.in_cache += len(self.fed)
        return [row[i : i + 1] for row in rows for i in range(row.shape[0])]

    def keep(self, accepted: int) -> None:
        """Removes all but the first ``accepted`` drafted tokens from the caches. If that restores a snapshot, the
        next pass computes accepted tokens after it again (``pending``)."""
        end = self._committed + accepted
        self.pending = []
        before = self.in_cache - len(self.fed)
        self.in_cache = before + end
        if self.hidden is not None:
            self.hidden.cut(self.in_cache)
        if end == len(self.fed):
            self._kept = []
            return
        if not self._kept:  # one pass, and caches that can be trimmed to any number of tokens
            for c in flat(self.cache):
                c.trim(len(self.fed) - end)
            return
        at, snapshot = max((k for k in self._kept if k[0] <= end), key=lambda k: k[0])
        snapshot.restore()
        self.pending = self.fed[at:end]
        self.in_cache = before + at
        self._kept = []

    def flush(self, last: int | None) -> None:
        """Computes the text's missing tokens into the caches, and the last token too if ``last`` is given."""
        tokens = [*self.pending, *([] if last is None else [last])]
        if tokens:
            with self.transaction(len(tokens)):
                self.pending = tokens[:-1]
                passes = self.verifying(tokens[-1], [])
                made = run_passes(self._session, passes, range(len(passes)), lambda _, rows: self.evaluate(*rows))
                self.verified(made)
                self.keep(0)

    def evaluate(self, *logits: mx.array) -> None:
        """Evaluates logits, caches and hidden states."""
        mx.eval(logits, handles(*self.cache), [] if self.hidden is None else self.hidden.arrays)
        note_held()
        if self.hidden is not None:
            self.hidden.settle()

    def _forward(
        self,
        ids: mx.array,
        embeddings: mx.array | None,
        *,
        at: int,
        quantizes: bool = True,
        built: Callable[[], object] | None = None,
    ) -> mx.array:
        extra: dict[str, Any] = {} if embeddings is None else {"input_embeddings": embeddings[None]}
        if self._arguments is not None:
            ids, extra = self._arguments(at, ids)
        # Embeddings have no known tokens, so no drafter could use their hidden states.
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
        if built is not None:
            built()
        if quantizes and (kv := self._kv) is not None:
            try:
                maybe_quantize_kv_cache(self.cache, kv.start, kv.group_size, kv.bits)
            except NotImplementedError as e:
                raise UsageError("kv_bits: mlx-lm cannot quantize this model's sliding windows; leave it out") from e
        if self._undo is not None:
            self._undo.passed()
        return logits

    @property
    def _anywhere(self) -> bool:
        """Whether all caches can be trimmed to any number of tokens."""
        return self._kv is None and all(map(by_offset, flat(self.cache)))

    def _will_quantize(self, tokens: int) -> bool:
        """Whether some cache is quantized within the next ``tokens`` tokens: right after the token that reaches
        ``start``, as in mlx-lm."""
        if self._kv is None:
            return False
        offsets = [c.offset for c in flat(self.cache) if hasattr(c, "to_quantized")]
        return any(offset + tokens >= self._kv.start for offset in offsets)
