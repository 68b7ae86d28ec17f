"""Computes vectors and ratings: the passes of a batch of texts share one reading of the streamed weights."""

from __future__ import annotations

import math
import os
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.generate import generation_stream

from outcore.checkpoint.find_model import require_tokenizer, resolve_model
from outcore.checkpoint.positions import config_of
from outcore.decode.loader import load_model
from outcore.decode.passes import Pass, generating, run_passes
from outcore.engine.session import Session
from outcore.errors import BudgetError, UnsupportedModelError, UsageError
from outcore.machine.device import on_cpu
from outcore.machine.interrupts import check
from outcore.modules.mlx_lm_compat import MODEL_TYPES
from outcore.options import LoadOptions
from outcore.plan.planner import make_plan

from .kinds import EMBED, RERANK, TASK, task_of
from .model_types import NAME
from .texts import Encoded, TextReader, passes_of, readings_of

# Most tokens that share a reading of the weights, as passes of the planned length.
MOST_PASSES = 256

# Tokens, as passes of the planned length, whose texts are put into passes by length: filling shorter texts up adds 6 %
# to what is computed (2,000 texts of 16 to 256 tokens), in windows of a single pass 42 %. Windows do not depend on
# memory, so passes, and the last bits of vectors, do not either.
WINDOW = 16

# Among the numbers of tokens that are predicted to be at least this share as fast as the best one, the one that reads
# least is taken.
WORTH = 0.99

Vector = np.ndarray[Any, np.dtype[np.float32]]


class Embedder:
    """A loaded model with its tokenizer: vectors of texts, or ratings of documents. Only the thread that loaded the
    model may call it."""

    def __init__(self, model: nn.Module, reader: TextReader) -> None:
        if reader.task == RERANK and hasattr(model, "language_model"):
            model.__dict__["answers"] = reader.answers
        self.model, self.reader = model, reader
        self.session: Session = model.outcore
        self._mask_rows = int(getattr(model, "mask_rows", 1))
        self._planned: dict[Any, int] = {}
        self._token_s = 0.0  # seconds of computing for each token of the last reading; 0: unknown

    @property
    def pass_tokens(self) -> int:
        return self.session.plan.prefill_step

    def windows(self, texts: Sequence[Encoded]) -> Iterator[list[Encoded]]:
        """Cuts texts into windows, whose texts are put into passes by length."""
        return readings_of(texts, WINDOW * self.pass_tokens)

    def next_of(self, texts: Sequence[Encoded]) -> list[Encoded]:
        """Returns the texts to compute next: a window, or as many as share a reading of the weights."""
        windows = self.windows(texts)
        some, most = next(windows), self.reading_tokens(sum(len(t.ids) for t in texts))
        for more in windows:
            if sum(len(t.ids) for t in some + more) > most:
                break
            some += more
        return some

    def reading_tokens(self, waiting: int) -> int:
        """Returns how many tokens share a reading, of ``waiting`` ones: as many as the plan predicts to be fastest.

        More tokens hide the disk behind the computing, but their hidden states displace resident layers. An assumed
        calibration is corrected by the readings until then.
        """
        session, step = self.session, self.pass_tokens
        if not session.plan.streams:
            return step
        size, budget, known = session.size, session.plan.budget_bytes, session.residency.calibration
        if not session.plan.calibrated and self._token_s and session.metrics.read_gbps:
            weights = sum(layer.resident for layer in size.layers)
            known = replace(
                known, kinds={}, read_gbps=_near(session.metrics.read_gbps),
                weight_gbps=_near(weights / (32 * self._token_s) / 1e9),
            )  # fmt: skip
        most = min(MOST_PASSES, 1 << (-(-waiting // step) - 1).bit_length())
        passes = size.graph(on_cpu(), session.plan.split).readings([step] * most)[0]
        at = passes, known.read_gbps, known.weight_gbps
        if at not in self._planned:
            found: list[tuple[float, float, int]] = [(0.0, 0.0, step)]
            for tokens in (step * min(passes, 1 << n) for n in range((passes - 1).bit_length() + 1)):
                with suppress(BudgetError):
                    plan = make_plan(replace(size, prompt=tokens), budget, calibration=known, prefill_step=step)
                    found.append((tokens / max(plan.ttft_s, 1e-9), plan.bytes_per_token / tokens, tokens))
            fastest = max(rate for rate, _, _ in found)
            self._planned[at] = min(each[1:] for each in found if each[0] >= fastest * WORTH)[1]
        return self._planned[at]

    def reserve(self, passes: Sequence[tuple[int, int]]) -> None:
        """Makes room for one reading with these passes, as their numbers of texts and lengths: resident layers go if
        there is none.

        Raises:
            BudgetError: a text is too long for the budget.
        """
        size, step = self.session.size, self.pass_tokens
        longest, tokens = max(length for _, length in passes), sum(count * length for count, length in passes)
        step = max(step, longest)
        wanted = max(size.prompt, -(-tokens // step) * step if self.session.plan.streams else step)
        if longest <= size.context and wanted <= size.prompt:
            return
        masks = 4 * self._mask_rows * max(0, longest - size.context)
        larger = replace(size, context=max(size.context, longest), prompt=wanted, hidden=size.hidden + masks)
        try:
            self.session.residency.accommodate(larger, [step])
        except BudgetError as e:
            raise BudgetError(f"a text of {longest} tokens: {e}", e.smallest) from None
        self._planned.clear()

    def run(self, texts: Sequence[Encoded]) -> list[Vector]:
        """Returns each text's vector, or one for each of its tokens, or its rating. As many passes share a reading of
        the weights as is predicted to be fastest and the budget has room for."""
        session, found = self.session, dict[int, Vector]()
        groups, at = list[list[int]](), 0
        for some in self.windows(texts):
            mine = passes_of([len(t.ids) for t in some], self.pass_tokens, filled=self.reader.filled)
            groups += [[at + n for n in group] for group in mine]
            at += len(some)
        done = 0

        def keep(_: int, outputs: Sequence[mx.array]) -> None:
            nonlocal done
            for out in outputs:
                mx.eval(out)
                rows = np.array(out.astype(mx.float32))
                found.update((n, self._own(rows[i], len(texts[n].ids))) for i, n in enumerate(groups[done]))
                done += 1

        with generating(self.model), mx.stream(generation_stream):
            while done < len(groups):
                session.before_pass()
                sizes = self._reading([(len(group), len(texts[group[-1]].ids)) for group in groups[done:]])
                passes = [
                    Pass(partial(self._call, *self._arrays([texts[n] for n in group])), count * length)
                    for group, (count, length) in zip(groups[done:], sizes, strict=False)
                ]
                began, waited, first = time.perf_counter(), session.metrics.stall_s, done
                outputs = run_passes(session, passes, range(len(passes)), keep, prompts=len(passes))
                keep(0, outputs[done - first :])
                computing = time.perf_counter() - began - (session.metrics.stall_s - waited)
                self._token_s = computing / sum(each.tokens for each in passes)
                check()
        return [found[n] for n in range(len(texts))]

    def _reading(self, passes: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        """Returns those of the passes, from the first on, that share the next reading; there is room for them."""
        sums = list(accumulate(count * length for count, length in passes))
        some = passes[: max(1, bisect_right(sums, self.reading_tokens(sums[-1])))]
        try:
            self.reserve(some)
        except BudgetError:
            if len(some) == 1:
                raise
            some = passes[: max(1, bisect_right(sums, self.session.size.prompt))]
            self.reserve(some)
        return some

    def _own(self, row: Vector, length: int) -> Vector:
        if row.ndim == 1:
            return row
        return row[-length:] if self.reader.left else row[:length]

    def _arrays(self, texts: Sequence[Encoded]) -> tuple[mx.array, mx.array, mx.array | None]:
        width = max(len(t.ids) for t in texts)
        ids = np.full((len(texts), width), self.reader.pad, np.int64)
        mask, types = np.zeros_like(ids), np.zeros_like(ids)
        for n, text in enumerate(texts):
            at = slice(width - len(text.ids), width) if self.reader.left else slice(0, len(text.ids))
            ids[n, at], mask[n, at] = text.ids, 1
            if text.types is not None:
                types[n, at] = text.types
        told = mx.array(types) if any(t.types is not None for t in texts) else None
        return mx.array(ids), mx.array(mask), told

    def _call(self, ids: mx.array, mask: mx.array, types: mx.array | None) -> mx.array:
        out: mx.array = self.model(ids, mask=mask, types=types)
        return out

    def vectors(self, texts: Sequence[Encoded]) -> list[Vector]:
        """Returns what ``run`` does, of any number of texts."""
        found = list[Vector]()
        while len(found) < len(texts):
            found += self.run(self.next_of(texts[len(found) :]))
        return found

    def embed(self, texts: Sequence[str], dimensions: int | None = None) -> Any:
        """Returns float32 vectors, (texts, width); for a model with a vector for each token a list of (tokens, width).

        Args:
            dimensions: keep so many numbers of each vector and bring it to length 1 again, for models trained for that.
        """
        found = [shortened_to(v, dimensions) for v in self.vectors(self.reader.encode(texts))]
        return found if found and found[0].ndim > 1 else np.array(found, np.float32)

    def rerank(self, query: str, documents: Sequence[str], instruction: str | None = None) -> list[float]:
        """Returns how well each document answers the query, between 0 and 1."""
        return [float(v[0]) for v in self.vectors(self.reader.pairs(query, documents, instruction))]

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> Embedder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def shortened_to(vector: Vector, dimensions: int | None) -> Vector:
    """Returns the first ``dimensions`` numbers of a vector, of length 1 again; None: all of it."""
    width = vector.shape[-1]
    if dimensions is None or dimensions == width:
        return vector
    if not 0 < dimensions <= width:
        raise UsageError(f"dimensions {dimensions}: this model's vectors have {width} numbers")
    short = vector[..., :dimensions]
    return short / np.maximum(np.linalg.norm(short, axis=-1, keepdims=True), 1e-9)


def _near(rate: float) -> float:
    """Returns a rate to two digits in base 2, so that plans are not made anew for what is noise."""
    return float(2 ** (round(2 * math.log2(rate)) / 2))


def load(
    path_or_hf_repo: str | os.PathLike[str],
    *,
    rerank: bool | None = None,
    revision: str | None = None,
    progress: Any = None,
    **options: Any,
) -> Embedder:
    """Loads an embedding or reranking model so that it runs within a memory budget.

    Args:
        rerank: load it to rate documents; None: as its folder says.
        options: fields of ``outcore.LoadOptions``, such as ``memory``; ``context`` is the longest text in tokens.

    Raises:
        BudgetError: the budget is too small; the error names the smallest that works.
        UnsupportedModelError: it is no such model, or mlx-vlm is not installed.
    """
    folder = resolve_model(path_or_hf_repo, revision)
    require_tokenizer(folder)
    task = task_of(folder) or EMBED if rerank is None else RERANK if rerank else EMBED
    reader = TextReader(folder, task, trust_remote_code=bool(options.get("trust_remote_code")))
    return open_embedder(folder, reader, LoadOptions(**options), progress)


def open_embedder(folder: Path, reader: TextReader, o: LoadOptions, progress: Any = None) -> Embedder:
    """Loads a model whose tokenizer is open. Raises as ``load``."""
    if not reader.kind:
        what = "rates no documents" if reader.task == RERANK else "makes no vectors"
        kind = config_of(folder).get("model_type")
        raise UnsupportedModelError(f"{folder}: {what}: its type, {kind}, is not among those in docs/embeddings.md")
    named = {**(o.model_config or {}), MODEL_TYPES: NAME, TASK: reader.task}
    o = replace(o, model_config=named, draft="none", prefix_cache="off")  # the rest as ``model_types.load_options``
    model, _ = load_model(folder, o, progress=progress)
    return Embedder(model, reader)
