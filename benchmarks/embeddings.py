"""Embedding and reranking types of mlx-vlm, streamed: the vectors of a tiny random model of each equal mlx-vlm's own.

    python benchmarks/embeddings.py [KIND ...] [--json FILE]

For each type: whether a tiny checkpoint can be made here, and whether the vectors of 24 texts are, bit for bit, those
that mlx-vlm's model gives for the same groups of texts, with a third of the layers in memory and within the smallest
budget; how far they are from those of each text alone, and from those of all texts in one padded group, which is what
mlx-vlm's server computes; and how often all streamed weights were read for them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

import _support  # noqa: F401
import embed_zoo
from outcore.options import LoadOptions
from outcore_embed.embedder import Embedder, open_embedder
from outcore_embed.kinds import CLASSIFIERS, EMBED, RERANK
from outcore_embed.texts import Encoded, TextReader, passes_of
from result_file import write_result

TEXTS = 24
PASS = 64


class Theirs:
    """mlx-vlm's model, as its server loads and calls it."""

    def __init__(self, folder: Path, reader: TextReader) -> None:
        self.reader = reader
        if reader.task == EMBED:
            from mlx_vlm.embedding_loader import load_embedding_model
            from mlx_vlm.models.pooling import read_pooling_config

            self.model: Any = load_embedding_model(folder)
            self.model.pooling_config = read_pooling_config(folder)
        elif reader.kind in CLASSIFIERS:
            from mlx_vlm.reranker_loader import load_sequence_classification_model

            self.model = load_sequence_classification_model(folder)
        else:
            import mlx_vlm.utils

            self.model = mlx_vlm.utils.load_model(folder)

    def __call__(self, texts: list[Encoded]) -> list[Any]:
        width = max(len(t.ids) for t in texts)
        ids, mask, types = (np.zeros((len(texts), width), np.int64) for _ in range(3))
        ids[:] = self.reader.pad
        for n, text in enumerate(texts):
            at = slice(width - len(text.ids), width) if self.reader.left else slice(0, len(text.ids))
            ids[n, at], mask[n, at], types[n, at] = text.ids, 1, text.types or [0] * len(text.ids)
        tokens, attended = mx.array(ids), mx.array(mask)
        if hasattr(getattr(self.model, "language_model", None), "_rope_deltas"):  # as in a new process
            self.model.language_model._position_ids = self.model.language_model._rope_deltas = None
        if self.reader.task == EMBED:
            out = self.model(tokens, attention_mask=attended).text_embeds
            rows = np.array(out.astype(mx.float32))
            return [r if r.ndim == 1 else r[m.astype(bool)] for r, m in zip(rows, mask, strict=True)]
        if self.reader.kind in CLASSIFIERS:
            told = {"token_type_ids": mx.array(types)} if types.any() else {}
            return list(np.array(mx.sigmoid(self.model(tokens, attended, **told).logits)))
        from mlx_vlm.server.reranking import _attention_mask, _binary_scores

        inner, model = self.model.language_model.model, self.model
        hidden = inner.embed_tokens(tokens)
        for layer in inner.layers:
            hidden = layer(hidden, _attention_mask(attended), None)
        scores = _binary_scores(model, inner.norm(hidden), attended, self.reader._tokenizer)
        return [np.array([s], np.float32) for s in scores]


def groups_of(theirs: Theirs, texts: list[Encoded], groups: list[list[int]]) -> list[Any]:
    found: dict[int, Any] = {}
    for group in groups:
        found.update(zip(group, theirs([texts[n] for n in group]), strict=True))
    return [found[n] for n in range(len(texts))]


def farthest(a: list[Any], b: list[Any]) -> float:
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True))


def equal(a: list[Any], b: list[Any]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def opened(folder: Path, reader: TextReader, texts: list[Encoded], **options: Any) -> Embedder:
    longest = max(len(t.ids) for t in texts)
    return open_embedder(folder, reader, LoadOptions(context=longest, prefill_step_size=max(PASS, longest), **options))


def encoded(reader: TextReader, count: int) -> list[Encoded]:
    texts = embed_zoo.texts(count)
    return reader.encode(texts) if reader.task == EMBED else reader.pairs(texts[0], texts)


def survey(kind: str, task: str, work: Path) -> dict[str, Any]:
    """What one type does; ``failed`` names the first step that did not go, ``why`` says how."""
    step, row = "built", dict[str, Any]()
    try:
        folder = embed_zoo.save_checkpoint(kind, work / f"{kind}-{task}", task)
        reader = TextReader(folder, task)
        texts = encoded(reader, TEXTS)
        step = "mlx-vlm"
        theirs = Theirs(folder, reader)
        alone = groups_of(theirs, texts, [[n] for n in range(TEXTS)])
        together = theirs(texts)
        step = "a third resident"
        with opened(folder, reader, texts, memory="8GB", resident=2) as ours:
            session = ours.session
            groups = passes_of([len(t.ids) for t in texts], ours.pass_tokens, filled=reader.filled)
            expected = groups_of(theirs, texts, groups)
            found = ours.run(texts)
            row |= {"layers": len(session.size.layers), "streamed": len(session.plan.streamed)}
            row |= {"passes": len(groups), "readings": session.metrics.sweeps, "a_token": found[0].ndim > 1}
            smallest = session.plan.smallest_budget_bytes
            if not session.plan.streamed or not equal(found, expected):
                raise AssertionError(f"by {farthest(found, expected)}; {session.notes}")
        row |= {"from_alone": farthest(found, alone), "from_one_group": farthest(found, together)}
        row["theirs_alone_from_one_group"] = farthest(alone, together)
        step = "smallest budget"
        with opened(folder, reader, texts, memory=smallest) as ours:
            at = ours.vectors(texts)
            if not ours.session.plan.streamed or farthest(at, found) > 1e-5:
                raise AssertionError(f"by {farthest(at, found)}")
        step = "resident"
        with opened(folder, reader, texts, memory="8GB") as ours:
            row["resident_equal"] = equal(ours.run(texts), found)
        row["equal"] = True
    except Exception as e:
        row |= {"equal": False, "failed": step, "why": f"{type(e).__name__}: {' '.join(str(e).split())}"[:300]}
        if os.environ.get("OUTCORE_DEBUG"):
            raise
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    pairs = [(k, EMBED) for k in embed_zoo.KINDS] + [(k, RERANK) for k in embed_zoo.RATING]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("OUTCORE_HOME", str(Path(folder) / "home"))
        for kind, task in pairs:
            if arguments.kinds and kind not in arguments.kinds:
                continue
            began = time.monotonic()
            rows.append({"type": kind, "task": task, **survey(kind, task, Path(folder))})
            print(f"{time.monotonic() - began:5.1f} s", json.dumps(rows[-1]), flush=True)
            write_result(arguments.json, "embeddings", Path(folder), types=rows)
    print(sum(r["equal"] for r in rows), "of", len(rows), file=sys.stderr)


if __name__ == "__main__":
    main()
