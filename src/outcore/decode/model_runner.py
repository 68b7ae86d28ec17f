"""The model whose text it is, with drafted tokens: computed in one sweep, and taken back where they were wrong."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx

from ..engine.undo import Undo
from ..modules.away import snapshot_bytes
from ..modules.cache_rollback import Snapshot, by_offset
from ..modules.call_values import flat
from .passes import ForwardPasses, Pass, run_passes


class ModelRunner(ForwardPasses):
    """A model and its caches, token by token or many tokens to a sweep.

    Args:
        in_blocks: drafted tokens are computed in one pass, which is faster where computing is what takes the time, and
            whose kernels may round differently; otherwise each in a pass of its own, with the bits of plain decoding.
        snapshots: bytes that snapshots may keep from being freed, beyond the one that is always needed.
        more: as in ``ForwardPasses``.
    """

    def __init__(self, *args: Any, in_blocks: bool = False, snapshots: int = 0, **more: Any) -> None:
        super().__init__(*args, **more)
        self.in_blocks, self.snapshots = in_blocks, snapshots
        self._fed: list[int] = []  # tokens of the last sweep
        self._kept: list[tuple[int, Snapshot]] = []  # and snapshots after so many of them
        self._committed = 0  # how many of them are part of the text
        self._pending: list[int] = []  # tokens that are part of the text and not in the caches
        self._before = 0  # ``in_cache`` before the last sweep

    @property
    def verifies(self) -> bool:
        """Whether several tokens can be computed in one sweep and taken back again."""
        streaming = self._session.streaming
        return not (self.transport.eager or (streaming is not None and streaming.evaluates))

    @contextmanager
    def transaction(self, tokens: int) -> Iterator[Undo | None]:
        pending = self._pending
        try:
            with super().transaction(tokens) as undo:
                yield undo
        except BaseException:
            self._pending, self._fed, self._kept = pending, [], []
            raise

    def verifying(self, token: int, drafted: Sequence[int]) -> list[Pass]:
        """The passes over ``token`` and drafted ones, which others may share; ``verified`` is to be told what they put
        out, and ``keep`` has to follow."""
        committed = [*self._pending, token]
        self._fed, self._committed = [*committed, *drafted], len(committed)
        self._kept = []
        n, total = self._committed, len(self._fed)
        self._before = self.in_cache
        if not self.in_blocks or self._will_quantize(total):
            ends = list(range(1, total + 1))
        else:
            ends = [total] if self._anywhere or not drafted else [n, total]
        fits = len(drafted) * snapshot_bytes(self.cache) <= self.snapshots
        # What is computed again has to be the same on all ranks.
        each = bool(self.transport.leasts([fits])[0]) if drafted else fits

        def run(first: int, end: int) -> mx.array:
            logits = self._forward(mx.array(self._fed[first:end], dtype=mx.int32), None, at=self._before + first)
            if end == n < total or (each and n < end < total):
                self._kept.append((end, Snapshot(self.cache)))
            return logits[0, max(0, n - 1 - first) :] if end >= n else logits[0, :0]

        return [Pass(functools.partial(run, a, b), b - a) for a, b in zip([0, *ends[:-1]], ends, strict=True)]

    def verified(self, rows: Sequence[mx.array]) -> list[mx.array]:
        """Logits (1, vocabulary) after the token and after each drafted one, of what the passes put out; evaluated."""
        self.evaluate(*rows)
        self.drain()
        self.in_cache += len(self._fed)
        return [row[i : i + 1] for row in rows for i in range(row.shape[0])]

    def goes_on(self, behind: Sequence[int]) -> None:
        """The caches are a text's under way, and do not hold these tokens of it yet, beside its last one."""
        self._pending = list(behind)

    def keep(self, accepted: int) -> None:
        """Take the caches back to the first ``accepted`` of the tokens that were drafted last.

        What lies between the snapshot that is there and the last accepted token is computed again by the next sweep.
        """
        end = self._committed + accepted
        self._pending = []
        self.in_cache = self._before + end
        if self.hidden is not None:
            self.hidden.cut(self.in_cache)
        if end == len(self._fed):
            self._kept = []
            return
        if self.in_blocks and self._anywhere:
            for c in flat(self.cache):
                c.trim(len(self._fed) - end)
            return
        at, snapshot = max((k for k in self._kept if k[0] <= end), key=lambda k: k[0])
        snapshot.restore()
        self._pending = self._fed[at:end]
        self.in_cache = self._before + at
        self._kept = []

    def state(self) -> tuple[list[Any], list[int]]:
        """The caches, and tokens of the text that they do not hold yet, beside its last one. Not to be changed."""
        return self.cache, self._pending

    @property
    def behind(self) -> int:
        """Tokens of the text that the caches do not hold yet, beside its last one."""
        return len(self._pending)

    @property
    def computed(self) -> int:
        """Tokens that were verified last, drafted or not."""
        return len(self._fed)

    def flush(self, last: int | None) -> None:
        """Bring the caches up to the text.

        Args:
            last: its last token, which is to be there too, as mlx-lm leaves it; None: it is not.
        """
        tokens = [*self._pending, *([] if last is None else [last])]
        if tokens:
            with self.transaction(len(tokens)):
                self._pending = tokens[:-1]
                passes = self.verifying(tokens[-1], [])
                made = run_passes(self._session, passes, range(len(passes)), lambda _, rows: self.evaluate(*rows))
                self.verified(made)
                self.keep(0)

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
