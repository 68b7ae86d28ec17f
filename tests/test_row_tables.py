"""Tables that are looked up by token, also inside layers: read by row, known before a pass, equal to mlx-lm's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.cli.main import main
from outcore.disk.open_file import read_chunk
from outcore.disk.reader import RowReader
from outcore.errors import ReadError
from outcore_calibrate.layer_times import PAST_CACHES, _rows
from outcore_rows.row_prefetch import RowPrefetch
from stand_ins import TokensOnly

ROWS, WIDTH, LAYERS = 600, 64, 4

OWN = f"""
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache

ModelArgs, ROWS = llama.ModelArgs, {ROWS}


class Pairs(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.parts = [nn.Embedding(ROWS, {WIDTH}), nn.Embedding(ROWS, {WIDTH})]
        self.proj = nn.Linear({WIDTH}, hidden, bias=False)

    def __call__(self, tokens, cache):
        before = cache[0] if cache[0] is not None else mx.zeros((tokens.shape[0], 1), dtype=tokens.dtype)
        history = mx.concatenate([before, tokens], axis=1)
        cache[0] = history[:, -1:]
        ids = (history[:, 1:] * 31 + history[:, :-1] * 17) % (2 * ROWS)
        low = self.parts[0](mx.where(ids < ROWS, ids, 0))
        high = self.parts[1](mx.where(ids < ROWS, 0, ids - ROWS))
        return self.proj(mx.where((ids < ROWS)[..., None], low, high))


class Layer(llama.TransformerBlock):
    def __init__(self, args, paired):
        super().__init__(args)
        if paired:
            self.pairs = Pairs(args.hidden_size)

    def __call__(self, x, tokens, mask, cache):
        if "pairs" in self:
            x = x + self.pairs(tokens, cache[1])
        return super().__call__(x, mask, cache[0])


class Inner(llama.LlamaModel):
    def __init__(self, args):
        super().__init__(args)
        self.layers = [Layer(args, i in (1, 2)) for i in range({LAYERS})]

    def __call__(self, tokens, cache):
        h = self.embed_tokens(tokens)
        mask = llama.create_attention_mask(h, cache[0][0])
        for layer, c in zip(self.layers, cache):
            h = layer(h, tokens, mask, c)
        return self.norm(h)


class Model(llama.Model):
    def __init__(self, args):
        super().__init__(args)
        self.model = Inner(args)

    def __call__(self, tokens, cache=None):
        return self.lm_head(self.model(tokens, cache))

    def make_cache(self):
        return [CacheList(KVCache(), ArraysCache(1)) for _ in self.model.layers]
"""

IDS = [3 + (7919 * i) % 100 for i in range(20)]


def made(kind: str, folder: Path) -> Path:
    """A checkpoint: of a type of the zoo, or ``own`` or ``quantized``, with tables of pairs in two layers."""
    if kind in zoo.CONFIGS:
        return zoo.save_checkpoint(kind, folder)
    folder.mkdir()
    (folder / "own.py").write_text(OWN)
    config = {
        **zoo.CONFIGS["llama"], "num_hidden_layers": LAYERS, "model_file": "own.py", "tie_word_embeddings": False,
        "max_position_embeddings": 512,
    }  # fmt: skip
    config.pop("layer_types", None)
    space: dict[str, Any] = {}
    exec(OWN, space)
    model = space["Model"](space["ModelArgs"].from_dict(config))
    zoo.make_weights(model)
    if kind == "quantized":
        model, config = mlx_lm.utils.quantize_model(model, config, group_size=32, bits=4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened(folder: Path, **options: Any) -> Any:
    given: dict[str, Any] = {"memory": "1GB", "resident": 1, "context": 64, "prompt": 32, "draft": "none"} | options
    return outcore.load_model(folder, trust_remote_code=True, govern=False, **given)[0]


def theirs(folder: Path, ids: list[int]) -> list[tuple[int, Any]]:
    model = mlx_lm.utils.load_model(folder, trust_remote_code=True)[0]
    steps = generate_step(mx.array(ids), model, max_tokens=5, prefill_step_size=8)
    return [(int(token), np.array(logprobs)) for token, logprobs in steps]


def ours(model: Any, ids: list[int]) -> list[tuple[int, Any]]:
    found = outcore.stream_generate(model, TokensOnly(), ids, max_tokens=5, prefill_step_size=8)
    return [(r.token, np.array(r.logprobs)) for r in found]


def equal(a: list[tuple[int, Any]], b: list[tuple[int, Any]]) -> bool:
    return len(a) == len(b) and all(t == u and np.array_equal(p, q) for (t, p), (u, q) in zip(a, b, strict=True))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return made("own", tmp_path / "model")


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Rows that were not being read yet when a pass asked for them."""
    found: list[tuple[Any, ...]] = []
    read = RowReader.read

    def seen(self: RowReader, path: Path, offset: int, nbytes: int, rows: Any, name: str) -> Any:
        found.append((name, rows)) if (path, offset, *rows) not in ahead else None
        return read(self, path, offset, nbytes, rows, name)

    begin, ahead = RowPrefetch.begin, set[tuple[Any, ...]]()

    def begun(self: RowPrefetch, *args: Any) -> None:
        begin(self, *args)
        ahead.clear()
        ahead.update(key for t in self._tables if t.reader is not None for key in t.reader.ahead)

    monkeypatch.setattr(RowReader, "read", seen)
    monkeypatch.setattr(RowPrefetch, "begin", begun)
    yield found


@pytest.mark.parametrize("kind", ["longcat_flash_ngram", "own", "quantized"])
def test_rows_are_known_before_a_pass(kind: str, tmp_path: Path, late: list[Any]) -> None:
    folder = made(kind, tmp_path / "model")
    model = opened(folder)
    with model.outcore as session:
        assert equal(ours(model, IDS), theirs(folder, IDS))
        assert session.metrics.rows_read > 0 and late == []


def test_tables_inside_layers_are_not_streamed_with_them(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = opened(own)
    with model.outcore as session:
        size = session.size
        tables = {t.table.layer.path: t.table for t in session.streaming.tables if t.reader is not None}
        inside = [f"model.layers.{i}.pairs.parts.{n}" for i in (1, 2) for n in (0, 1)]
        assert sorted(tables) == ["model.embed_tokens", *inside]
        assert size.tables == sum(t.row_bytes * t.places[0].shape[0] for t in tables.values())
        # One token looks up a row of each part of both layers, and one of the embedding.
        assert size.row_bytes == 5 * WIDTH * 4
        assert {layer.resident for layer in size.layers} == {size.layers[0].resident, size.layers[1].resident}
        assert size.layers[1].resident - size.layers[0].resident == WIDTH * 64 * 4  # what multiplies the rows
        assert session.plan.bytes_per_token == sum(p.read for p in session.plan.parts) + size.row_bytes
    assert main(["info", str(own), "--trust-remote-code"]) == 0
    assert "read by row, 1.28 KB a token" in capsys.readouterr().out


def test_a_read_of_rows_that_fails_loses_nothing(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = theirs(own, IDS)
    failing = False

    def failed(what: Any, *args: Any) -> Any:
        if failing and what.nbytes == WIDTH * 4:
            raise OSError(5, "Input/output error")
        return read_chunk(what, *args)

    monkeypatch.setattr("outcore.disk.reader.read_chunk", failed)
    model = opened(own)
    with model.outcore:
        cache = make_prompt_cache(model)
        expected = [model(mx.array([ids]), cache=cache) for ids in (IDS[:8], IDS[8:9], IDS[9:10])]
        mx.eval(expected)
        again = make_prompt_cache(model)
        mx.eval(model(mx.array([IDS[:8]]), cache=again))
        failing = True
        with pytest.raises(ReadError, match=r"rows of model\.(embed_tokens|layers\.\d\.pairs\.parts\.\d)"):
            mx.eval(model(mx.array([IDS[8:9]]), cache=again))
        failing = False
        for n, at in enumerate((8, 9), 1):
            assert mx.array_equal(model(mx.array([IDS[at : at + 1]]), cache=again), expected[n]).item()
        assert equal(ours(model, IDS), wanted)


def test_rows_foreseen_wrongly_are_read_when_asked_for(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = RowPrefetch.begin

    def other(self: RowPrefetch, run: Any, args: Any, kwargs: Any) -> None:
        begin(self, run, ((args[0] + 1) % 100, *args[1:]), kwargs)

    monkeypatch.setattr(RowPrefetch, "begin", other)
    model = opened(own)
    with model.outcore as session:
        assert equal(ours(model, IDS), theirs(own, IDS))
        assert not any(t.reader.ahead for t in session.streaming.tables if t.reader is not None)


@pytest.mark.parametrize("options", [{"draft": "ngram"}, {"memory": "smallest"}, {"prefix_cache": "on"}], ids=str)
def test_rows_with_what_else_there_is(own: Path, options: dict[str, Any], late: list[Any]) -> None:
    if options.get("memory"):
        with opened(own).outcore as session:
            options = {"memory": session.plan.smallest_budget_bytes, "resident": None}
    wanted = theirs(own, IDS)
    for _ in range(2):
        model = opened(own, **options)
        with model.outcore:
            assert equal(ours(model, IDS), wanted)
    assert late == []


def test_texts_of_a_batch_are_those_that_they_are_alone(own: Path, late: list[Any]) -> None:
    prompts = [IDS[:9], IDS[3:15], IDS]
    model = opened(own)
    with model.outcore:
        alone = [[t for t, _ in ours(model, ids)] for ids in prompts]
        found = outcore.batch_generate(model, TokensOnly(), prompts, max_tokens=5, return_token_ids=True)
    assert found.token_ids == alone and late == []


def test_measuring_takes_no_more_memory_for_a_table_in_many_parts(own: Path) -> None:
    with opened(own).outcore as session:
        table = next(t for t in session.profile.tables if "parts" in t.layer.path)
    large = replace(table, places=(replace(table.places[0], shape=(10**7, WIDTH), nbytes=10**7 * WIDTH * 4),))
    assert _rows(large, 1) * large.row_bytes <= PAST_CACHES
    assert 128 * _rows(large, 128) * large.row_bytes <= PAST_CACHES
