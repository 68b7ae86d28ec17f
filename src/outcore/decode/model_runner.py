"""The model whose text it is, over the text's caches: a prompt, the next token, or drafted ones, which are computed in
one pass over the weights and taken back where they were wrong."""

from __future__ import annotations

import contextlib
import functools
import time
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
from ..modules.away import snapshot_bytes
from ..modules.cache_rollback import Snapshot, by_offset
from ..modules.call_values import caches_in, flat, handles
from .passes import HiddenKeeper, KvBits, Pass, chunks, run_passes


class ModelRunner:
    """A model and the caches of one text.

    Args:
        cache: as from ``mlx_lm.models.cache.make_prompt_cache``; what it holds already stays.
        owned: somebody else goes on with the caches, so whatever fails they are what they were before it.
        kv: how keys and values are quantized; None: they are not.
        hidden: keeps the last hidden states of the text's tokens; None: nobody wants them.
        in_blocks: drafted tokens are computed in one pass, which is faster where computing is what takes the time, and
            whose kernels may round differently; otherwise each in a pass of its own, with the bits of plain decoding.
        in_cache: tokens that the caches hold already of the prompt.

    Attributes:
        prompt_s: seconds that the prompt took; 0 before it.
        in_cache: tokens that went into the caches, of the prompt and then of the text.
        pending: tokens of the text that the caches do not hold yet, beside its last one.
        fed: tokens that were verified last, drafted or not.
        snapshots: bytes that snapshots may keep from being freed, beyond the one that is always needed.
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
    ) -> None:
        self._model, self._session, self._kv = model, session, kv
        self.cache, self.owned, self.hidden, self.in_blocks = cache, owned, hidden, in_blocks
        self.in_cache, self.prompt_s, self.snapshots = in_cache, 0.0, 0
        self.pending: list[int] = []
        self._undo: Undo | None = None  # of a model that is all in memory
        self.fed: list[int] = []
        self._kept: list[tuple[int, Snapshot]] = []  # and snapshots after so many of them
        self._committed = 0  # of them, part of the text

    @contextmanager
    def transaction(self, tokens: int) -> Iterator[Undo | None]:
        """A pass over so many tokens and what is made of it: all of it, or the caches are as they were before.

        Yields:
            what takes the caches back later, until the next pass begins; None where nobody goes on with them.
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
        """The same of a model that is all in memory."""
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

    # A prompt

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
        total, held, kv, hidden = (
            len(ids) if embeddings is None else len(embeddings),
            self.in_cache,
            self._kv,
            self.hidden,
        )
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
            # Of all chunks but the last only what they leave behind is computed: hidden states with it.
            if hidden is not None and hidden.end != seen and (streaming := self._session.streaming) is not None:
                streaming.leaves(hidden.arrays[-1])
            return logits

        parts = chunks(total, step, None if kv is None else kv.step)
        return [Pass(functools.partial(run, part), part.stop - part.start) for part in parts]

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

    # The next token

    def step(self, token: mx.array) -> mx.array:
        """Logits (1, vocabulary) after one more token, of shape (1,); nothing is evaluated."""
        logits = self._forward(token, None, at=self.in_cache)
        self.in_cache += 1
        return logits[:, -1, :]

    def attempt(self, token: mx.array) -> tuple[mx.array, Callable[[], None]]:
        """The same, and what takes it back, where everything is resident."""
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

    # Drafted tokens

    def verifying(self, token: int, drafted: Sequence[int]) -> list[Pass]:
        """The passes over ``token`` and drafted ones, which others may share; ``verified`` is to be told what they put
        out, and ``keep`` has to follow."""
        committed = [*self.pending, token]
        self.fed, self._committed = [*committed, *drafted], len(committed)
        self._kept = []
        n, total, before = self._committed, len(self.fed), self.in_cache
        if not self.in_blocks or self._will_quantize(total):
            ends = list(range(1, total + 1))
        else:
            ends = [total] if self._anywhere or not drafted else [n, total]
        fits = len(drafted) * snapshot_bytes(self.cache) <= self.snapshots
        # What is computed again has to be the same on all ranks.
        each = bool(self._session.transport.leasts([fits])[0]) if drafted else fits

        def run(first: int, end: int) -> mx.array:
            logits = self._forward(mx.array(self.fed[first:end], dtype=mx.int32), None, at=before + first)
            if end == n < total or (each and n < end < total):
                self._kept.append((end, Snapshot(self.cache)))
            return logits[0, max(0, n - 1 - first) :] if end >= n else logits[0, :0]

        return [Pass(functools.partial(run, a, b), b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def verified(self, rows: Sequence[mx.array]) -> list[mx.array]:
        """Logits (1, vocabulary) after the token and after each drafted one, of what the passes put out; evaluated."""
        self.evaluate(*rows)
        self.drain()
        self.in_cache += len(self.fed)
        return [row[i : i + 1] for row in rows for i in range(row.shape[0])]

    def keep(self, accepted: int) -> None:
        """Take the caches back to the first ``accepted`` of the tokens that were drafted last.

        What lies between the snapshot that is there and the last accepted token is computed again by the next pass.
        """
        end = self._committed + accepted
        self.pending = []
        before = self.in_cache - len(self.fed)
        self.in_cache = before + end
        if self.hidden is not None:
            self.hidden.cut(self.in_cache)
        if end == len(self.fed):
            self._kept = []
            return
        if self.in_blocks and self._anywhere:
            for c in flat(self.cache):
                c.trim(len(self.fed) - end)
            return
        at, snapshot = max((k for k in self._kept if k[0] <= end), key=lambda k: k[0])
        snapshot.restore()
        self.pending = self.fed[at:end]
        self.in_cache = before + at
        self._kept = []

    def flush(self, last: int | None) -> None:
        """Bring the caches up to the text.

        Args:
            last: its last token, which is to be there too, as mlx-lm leaves it; None: it is not.
        """
        tokens = [*self.pending, *([] if last is None else [last])]
        if tokens:
            with self.transaction(len(tokens)):
                self.pending = tokens[:-1]
                passes = self.verifying(tokens[-1], [])
                made = run_passes(self._session, passes, range(len(passes)), lambda _, rows: self.evaluate(*rows))
                self.verified(made)
                self.keep(0)

    # What passes leave behind

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

    def _forward(
        self,
        ids: mx.array,
        embeddings: mx.array | None,
        *,
        at: int,
        quantizes: bool = True,
        built: Callable[[], object] | None = None,
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
        """Whether all caches can be taken back to any token."""
        return self._kv is None and all(map(by_offset, flat(self.cache)))

    def _will_quantize(self, tokens: int) -> bool:
        """Whether some cache gets quantized within so many tokens: mlx-lm does so right after the one that is due."""
        if self._kv is None:
            return False
        offsets = [c.offset for c in flat(self.cache) if hasattr(c, "to_quantized")]
        return any(offset + tokens >= self._kv.start for offset in offsets)
