"""Embedding and reranking models (``outcore_embed``), streamed: mlx-vlm's vectors, whatever the memory.

``benchmarks/embeddings.py`` goes through all types.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outcore.errors import BudgetError, RequestError, UnsupportedModelError, UsageError
from outcore_embed.files import Text, VectorFile, read_texts
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

    folder = embed_zoo.save_checkpoint("bert", tmp_path / "m")
    texts = embed_zoo.texts(12)
    model = load_embedding_model(folder)
    with load(folder, memory="1GB", resident=2, context=64, prefill_step_size=64) as ours:
        assert len(ours.session.plan.streamed) == 4
        encoded = ours.reader.encode(texts)
        found = ours.embed(texts)
        assert ours.session.metrics.sweeps == 1
        least = ours.session.plan.smallest_budget_bytes
    alone = [np.array(model(mx.array([list(e.ids)])).text_embeds)[0] for e in encoded]
    np.testing.assert_array_equal(found, np.stack(alone))
    with load(folder, memory=least, context=64, prefill_step_size=64) as ours:
        session = ours.session
        ours.reading_tokens = lambda _: 128  # type: ignore[method-assign]  # of 3 passes, 64 tokens each
        np.testing.assert_array_equal(ours.embed(texts), found)
        assert session.plan.split and session.metrics.sweeps == 2  # layers in parts share readings, too
        # A text longer than planned makes room for itself, or is refused by its length.
        with pytest.raises(BudgetError, match="a text of 402 tokens: "):
            ours.embed(["w1 " * 400])
        np.testing.assert_array_equal(ours.embed(texts), found)
    with load(folder, memory=8 * least, context=64, prefill_step_size=64) as ours:
        assert ours.embed(["w1 " * 400]).shape == (1, 64)


@needed
def test_a_model_that_makes_vectors_is_refused_where_text_is_wanted(tmp_path: Path) -> None:
    import embed_zoo
    import outcore

    folder = embed_zoo.save_checkpoint("bert", tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match="makes vectors, no text: use outcore embed"):
        outcore.load(str(folder))


@needed
def test_info_and_plan_count_texts_and_agree_on_budgets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import embed_zoo
    from outcore.cli.main import main

    folder = str(embed_zoo.save_checkpoint("bert", tmp_path / "m"))
    assert main(["info", folder, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["resident_budget_bytes"] >= told["smallest_budget_bytes"]  # both with texts of a pass at once
    memory = ["--memory", f"{told['smallest_budget_bytes']}B"]
    assert main(["plan", folder, "--no-calibrate", *memory]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "read per pass" in out and "tokens/s (" in out and ") of texts; peak" in out and "first token" not in out


# Files


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32)


@pytest.mark.parametrize("name", ["v.npy", "v.jsonl"])
def test_a_run_that_was_killed_goes_on_where_its_file_ends(name: str, tmp_path: Path) -> None:
    path, vectors = tmp_path / name, rows(5)
    records = [{"index": n} for n in range(5)]
    with VectorFile(path, ["m"], 5) as file:
        file.begin()
        file.write(records[:2], vectors[:2])
    with path.open("ab") as raw:
        raw.write(b'{"index": 2, "emb')  # what a kill leaves of the next
    with VectorFile(path, ["m"], 5, resume=True) as file:
        assert file.done == 2
        file.begin()
        file.write(records[2:], vectors[2:])
        file.finish()
    found = np.load(path) if name.endswith("npy") else [json.loads(line) for line in path.read_text().splitlines()]
    if name.endswith("jsonl"):
        assert [each["index"] for each in found] == list(range(5))
        found = np.array([each["embedding"] for each in found], np.float32)
    np.testing.assert_array_equal(found, vectors)
    assert [each.name for each in tmp_path.iterdir()] == [name]


def test_an_output_file_is_replaced_or_continued_only_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "v.npy"
    with VectorFile(path, ["m"], 3) as file:
        file.begin()
        file.write([], rows(1))
    with pytest.raises(UsageError, match="exists already; --resume continues it"):
        VectorFile(path, ["m"], 3)
    for made_of, total in ((["other"], 3), (["m"], 4)):
        with pytest.raises(UsageError, match="is not the unfinished output of these texts"):
            VectorFile(path, made_of, total, resume=True)
    assert VectorFile(path, ["other"], 4, overwrite=True).done == 0 and len(np.load(path)) == 1


@pytest.mark.parametrize(
    ("lines", "texts"),
    [
        ("one\n\n  two \n", [Text("one"), Text("two")]),
        ('{"text": "a", "id": 7}\n{"input": "b"}\n', [Text("a", "7"), Text("b")]),
        ('{"custom_id": "c", "url": "/v1/embeddings", "body": {"input": "d"}}', [Text("d", "c")]),
    ],
)
def test_texts_are_lines_or_json_lines(lines: str, texts: list[Text], tmp_path: Path) -> None:
    (tmp_path / "t").write_text(lines)
    assert read_texts(tmp_path / "t") == texts


@pytest.mark.parametrize("lines", ['{"text": "a"}\nb', '{"text": ""}', '{"text": ["a"]}', '{"text": "\\ud800"}', "{}"])
def test_a_line_that_is_no_text_is_named(lines: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(lines)
    with pytest.raises(UsageError, match=f"line {lines.count(chr(10)) + 1}: "):
        read_texts(tmp_path / "t")


@needed
def test_the_command_goes_on_after_an_interrupt_and_gives_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    import embed_zoo
    from outcore.cli.main import main
    from outcore_embed.embedder import Embedder

    folder = embed_zoo.save_checkpoint("bert", tmp_path / "m")
    (tmp_path / "t.txt").write_text("\n".join(embed_zoo.texts(12)))
    given = ["embed", str(folder), "--memory", "1GB", "--resident", "2", "--input", str(tmp_path / "t.txt"), "--json"]
    monkeypatch.setattr(Embedder, "reading_tokens", lambda *_: 64)
    monkeypatch.setattr(Embedder, "windows", lambda _, texts: readings_of(texts, 64))
    whole, part = tmp_path / "whole.npy", tmp_path / "part.npy"
    assert main([*given, "--output", str(whole)]) == 0
    run, runs = Embedder.run, list[int]()

    def interrupted(self: Embedder, texts: Any) -> Any:
        runs.append(len(texts))
        if len(runs) == 2:
            raise KeyboardInterrupt
        return run(self, texts)

    monkeypatch.setattr(Embedder, "run", interrupted)
    assert main([*given, "--output", str(part)]) == 130
    assert len(np.load(part)) == runs[0] < 12
    assert main([*given, "--output", str(part), "--resume"]) == 0
    np.testing.assert_array_equal(np.load(part), np.load(whole))
    told = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert (told["texts"], told["resumed"], told["width"]) == (12, runs[0], 64)


# The server


@needed
def test_a_server_answers_for_each_kind_and_clients_share_a_reading(tmp_path: Path) -> None:
    import embed_zoo
    from outcore.options import LoadOptions
    from outcore.serve.api import HttpRequest
    from outcore.serve.events import GenerationRequest
    from outcore.serve.service import ModelService, ServiceOptions
    from outcore.serve.shelf import Shelf
    from outcore_embed import apis

    vectors = embed_zoo.save_checkpoint("bert", tmp_path / "vectors")
    rates = embed_zoo.save_checkpoint("bert", tmp_path / "rates", RERANK)
    service = ModelService(
        Shelf([str(vectors), str(rates)]), ServiceOptions(LoadOptions(memory="1GB", resident=2, draft="none"))
    )

    def asked(handle: Any, **body: Any) -> Any:
        return handle(HttpRequest(service, body))

    async def talk() -> None:
        first = await asked(apis.embeddings, model="vectors", input=["w1 w2", [1, 8, 2]], encoding_format="base64")
        rows = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in first["data"]]
        assert first["usage"]["prompt_tokens"] == 7 and np.linalg.norm(rows, axis=1) == pytest.approx([1, 1], rel=1e-5)
        assert service.engine.loaded is not None
        metrics, begun = service.engine.loaded.session.metrics, threading.Event()
        before = metrics.sweeps
        held = service.engine.call(begun.wait)
        several = [asyncio.create_task(asked(apis.embed, model="vectors:latest", input=f"w{n}")) for n in range(3)]
        while sum(len(q._jobs) for q in apis._queues[service].values()) < 3:
            await asyncio.sleep(0.01)
        begun.set()
        await asyncio.wrap_future(held)
        found = [(await each)["embeddings"][0] for each in several]
        assert metrics.sweeps == before + 1
        alone = await asked(apis.embed_one, model="vectors", prompt="w2")
        assert alone["embedding"] == found[2]
        short = await asked(apis.embeddings, model="vectors", input="w1 w2", dimensions=8)
        np.testing.assert_allclose(short["data"][0]["embedding"], rows[0][:8] / np.linalg.norm(rows[0][:8]), rtol=1e-5)
        gone = weakref.ref(service.engine.loaded.model)
        ranked = await asked(apis.rerank, model="rates", query="w1", documents=["w2", {"text": "w3"}, "w4"], top_n=2)
        scores = [each["relevance_score"] for each in ranked["results"]]
        assert scores == sorted(scores, reverse=True) and len(scores) == 2
        assert gone() is None, "a model that another one has replaced leaves memory"
        refused = [
            (apis.embeddings, {"model": "rates", "input": "x"}, "rates rates documents and makes no vectors"),
            (apis.rerank, {"model": "vectors", "query": "x", "documents": ["x"]}, "vectors makes vectors and rates no"),
            (apis.embeddings, {"model": "vectors", "input": [[1, 999]]}, "the model has no token 999"),
            (apis.embeddings, {"model": "vectors", "input": ["a", ""]}, r"input\[1\]: give a string"),
            (apis.embeddings, {"model": "vectors", "input": []}, "0 texts"),
            (apis.embeddings, {"model": "vectors", "input": "w1 " * 600}, "has more than 500 tokens"),
            (apis.embeddings, {"model": "vectors", "input": "x", "dimensions": 65}, "dimensions: this model's vectors"),
        ]
        for handle, body, why in refused:
            with pytest.raises(RequestError, match=why):
                await asked(handle, **body)
        assert len((await asked(apis.embed, model="vectors", input="w1 " * 600))["embeddings"]) == 1  # Ollama's is cut
        with pytest.raises(RequestError, match="vectors makes vectors, no text"):
            await service.prompt(GenerationRequest(model="vectors", prompt="x"))

    try:
        asyncio.run(talk())
    finally:
        service.close()
