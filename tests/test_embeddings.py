"""Embedding and reranking models (``outcore_embed``), streamed: mlx-vlm's vectors, whatever the memory.

``benchmarks/embeddings.py`` goes through all types.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.errors import UnsupportedModelError
from outcore_embed.kinds import EMBED, RERANK, kind_of, task_of
from outcore_embed.model_types import no_text
from outcore_embed.texts import Encoded, passes_of, readings_of

THERE = True
try:
    import mlx_vlm.models  # noqa: F401
except ImportError:
    THERE = False

needed = pytest.mark.skipif(not THERE, reason="mlx-vlm is not installed (the extra vision)")


def folder_of(at: Path, config: dict[str, Any], *files: str) -> Path:
    at.mkdir(parents=True)
    (at / "config.json").write_text(json.dumps(config))
    for file in files:
        (at / file).parent.mkdir(exist_ok=True)
        (at / file).write_text("{}")
    return at


@pytest.mark.parametrize(
    ("name", "config", "files", "task"),
    [
        ("a", {"model_type": "bert"}, [], EMBED),
        ("a", {"model_type": "xlm-roberta"}, [], EMBED),
        ("a", {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}, [], RERANK),
        ("a", {"model_type": "qwen3"}, [], None),
        ("a", {"model_type": "qwen3"}, ["1_Pooling/config.json"], EMBED),
        ("Qwen3-Embedding-0.6B", {"model_type": "qwen3"}, [], EMBED),
        ("Qwen3-Reranker-0.6B", {"model_type": "qwen3"}, [], RERANK),
        ("a", {"model_type": "llama"}, ["1_Pooling/config.json"], None),
        ("embeddings", {"model_type": "llama"}, [], None),
    ],
)
def test_what_a_model_is_for_is_known_by_its_folder(
    tmp_path: Path, name: str, config: dict[str, Any], files: list[str], task: str | None
) -> None:
    folder = folder_of(tmp_path / name, config, *files)
    assert task_of(folder) == task
    assert bool(no_text(folder)) == (task is not None)


def test_a_language_model_named_embed_is_used_for_what_it_is_asked() -> None:
    assert kind_of({"model_type": "qwen3"}, EMBED) == "qwen3_embedding"
    assert kind_of({"model_type": "qwen3"}, RERANK) == "qwen3"
    assert kind_of({"model_type": "llama"}, EMBED) is None


def test_passes_hold_texts_of_like_length_and_no_more_tokens_than_allowed() -> None:
    lengths = [9, 2, 30, 2, 3, 9]
    groups = passes_of(lengths, 18)
    assert sorted(n for group in groups for n in group) == list(range(6))
    assert groups == [[1, 3, 4], [0, 5], [2]]
    assert passes_of(lengths, 18, filled=False) == [[1, 3], [4], [0, 5], [2]]


def test_readings_keep_the_order_of_texts() -> None:
    texts = [Encoded([0] * n) for n in (4, 4, 4, 20, 1)]
    assert [[len(t.ids) for t in some] for some in readings_of(texts, 10)] == [[4, 4], [4], [20], [1]]


@needed
def test_vectors_are_mlx_vlms_within_a_third_and_within_the_smallest_budget(tmp_path: Path) -> None:
    import mlx.core as mx
    from mlx_vlm.embedding_loader import load_embedding_model

    import embed_zoo
    from outcore_embed.embedder import load

    folder = embed_zoo.save_checkpoint("modernbert", tmp_path / "m")
    texts = embed_zoo.texts(12)
    model = load_embedding_model(folder)
    with load(folder, memory="1GB", resident=2, context=64, prefill_step_size=64) as ours:
        assert len(ours.embedder.session.plan.streamed) == 4
        encoded = ours.reader.encode(texts)
        found = ours.embed(texts)
        assert ours.embedder.session.metrics.sweeps == 1
        least = ours.embedder.session.plan.smallest_budget_bytes
    alone = [np.array(model(mx.array([list(e.ids)])).text_embeds)[0] for e in encoded]
    np.testing.assert_array_equal(found, np.stack(alone))
    with load(folder, memory=least, context=64, prefill_step_size=64) as ours:
        assert ours.embedder.session.plan.streams
        np.testing.assert_array_equal(ours.embed(texts), found)


@needed
def test_a_model_that_makes_vectors_is_refused_where_text_is_wanted(tmp_path: Path) -> None:
    import embed_zoo
    import outcore

    folder = embed_zoo.save_checkpoint("bert", tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="makes vectors, no text: use outcore embed"):
        outcore.load(str(folder))
