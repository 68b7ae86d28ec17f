"""The prefix cache with keys and values that mlx-lm quantizes: a text is to the bit what it is without it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import QuantizedKVCache, make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

import outcore
import zoo
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli.main import main
from outcore.decode import generate
from outcore.decode.kv_slices import KvBits
from outcore.errors import BudgetError
from test_prefix import BLOCK, TEXT, answer, opened, same, small_blocks

assert small_blocks  # of 16 tokens, here too

FIRST, LONGER, EDITED = TEXT[:150], TEXT[:135] + TEXT[200:225], TEXT[:50] + TEXT[300:350]
"""A prompt; one that has 90 % of it; and one that parts from it early."""


@pytest.fixture
def tokenizer(served: Path) -> TokenizerWrapper:
    return load_tokenizer(served)


@pytest.fixture(params=[64])
def chunk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Tokens of mlx-lm's chunks: four blocks, as 2,048 are of 512."""
    monkeypatch.setattr(generate, "MLX_LM_STEP", request.param)
    step: int = request.param
    return step


def kv(bits: int = 8, start: int = 0) -> dict[str, int]:
    return {"kv_bits": bits, "kv_group_size": 32, "quantized_kv_start": start}


def cold(folder: Path, tokenizer: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    """Answers of a model without a prefix cache, that computes prompts block by block."""
    found, model = [], opened(folder, "off", resident=1)
    with pytest.MonkeyPatch.context() as patch, model.outcore:
        patch.setattr(generate, "make_room", lambda *_, **__: BLOCK)
        for ids in prompts:
            rows = list(outcore.stream_generate(model, tokenizer, ids, max_tokens=6, **options))
            found.append(([r.token for r in rows], [np.array(r.logprobs.astype(mx.float32)) for r in rows]))
    return found


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(("bits", "start"), [(8, 0), (4, 70), (8, 140), (4, 150), (8, 5000)])
def test_prompts_come_back_to_the_bit(bits: int, start: int, tmp_path: Path, tokenizer: Any) -> None:
    """Quantized from the begin, in the middle, at the end alone, and not at all; after a restart."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    prompts = [FIRST, LONGER, EDITED, TEXT[:100] + TEXT[200:260], TEXT[:113], TEXT[:49]]
    expected = cold(folder, tokenizer, prompts, **kv(bits, start))
    model = opened(folder, resident=1)
    assert same(answer(model, tokenizer, FIRST, **kv(bits, start)), expected[0])
    model.outcore.close()
    model = opened(folder, resident=1)
    got = [answer(model, tokenizer, ids, **kv(bits, start)) for ids in prompts]
    assert all(map(same, got, expected))
    # The last two end a token behind a block: before that one mlx-lm quantizes.
    assert [g[2] for g in got] == [150, 128, 48, 96, 112, 48] and [g[3] for g in got] == [0, 1, 1, 1, 1, 1]
    model.outcore.close()


KINDS = {"qwen3_5": 0, "nemotron_h": 0, "llama4": 0, "longcat_flash": 48}
"""What is found of ``EDITED``: recurrent states between plain caches, chunks, and caches in lists, which stay plain."""


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize(
    ("model_type", "start"),
    [("qwen3_5", 0), ("qwen3_5", 70), ("nemotron_h", 70), ("llama4", 0), ("longcat_flash", 70)],
)
def test_caches_that_are_not_quantized_come_back_beside_those_that_are(
    model_type: str, start: int, tmp_path: Path, tokenizer: Any
) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    expected = cold(folder, tokenizer, [FIRST, LONGER, EDITED], **kv(8, start))
    for found in (0, 150):
        model = opened(folder, resident=1)
        got = [answer(model, tokenizer, ids, **kv(8, start)) for ids in (FIRST, LONGER, EDITED)]
        assert all(map(same, got, expected))
        assert [g[2] for g in got] == ([150, 160, 100] if found else [0, 128, KINDS[model_type]])
        model.outcore.close()


@pytest.mark.parametrize("chunk", [8, 16, 24, 40], indirect=True)
def test_whatever_mlx_lms_chunks_are(chunk: int, tmp_path: Path, tokenizer: Any) -> None:
    """Smaller than a block, as large, and such as end within blocks: there nothing is kept."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    expected = cold(folder, tokenizer, [FIRST, LONGER], **kv(8, 20))
    model = opened(folder, resident=1)
    got = [answer(model, tokenizer, ids, **kv(8, 20)) for ids in (FIRST, LONGER, FIRST)]
    assert [g[2] for g in got] == ([0, 128, 150] if chunk in (8, 16) else [0, 0, 0])
    assert all(map(same, got, [*expected, expected[0]]))
    model.outcore.close()


@pytest.mark.usefixtures("chunk")
def test_other_settings_find_nothing_of_it(tmp_path: Path, tokenizer: Any) -> None:
    model = opened(zoo.save_checkpoint("qwen3", tmp_path / "model"), resident=1)
    ways: list[dict[str, int]] = [{}, kv(8, 0), kv(4, 0), kv(8, 1)]
    for found in (0, 40):
        assert [answer(model, tokenizer, FIRST[:40], 1, **way)[2] for way in ways] == [found] * len(ways)
    model.outcore.close()


@pytest.mark.usefixtures("chunk")
@pytest.mark.parametrize("start", [0, 70])
def test_the_callers_own_caches_are_filled_and_go_on(start: int, tmp_path: Path, tokenizer: Any) -> None:
    """With quantized ones in their places, as in mlx-lm; and an error leaves those that were there."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    model, texts = opened(folder, resident=1), []

    def fails(_: Any) -> Any:
        raise ZeroDivisionError

    for found in (0, 150):
        mine = make_prompt_cache(model)
        before = list(mine)
        if found:
            with pytest.raises(ZeroDivisionError):
                answer(model, tokenizer, FIRST, prompt_cache=mine, sampler=fails, **kv(8, start))
            assert all(a is b and a.empty() for a, b in zip(mine, before, strict=True))
        first = answer(model, tokenizer, FIRST, prompt_cache=mine, **kv(8, start))
        assert first[2] == found and all(type(c) is QuantizedKVCache and c.offset == 156 for c in mine)
        texts.append((first, answer(model, tokenizer, TEXT[200:230], prompt_cache=mine, **kv(8, start))))
    assert all(map(same, *texts))
    model.outcore.close()


@pytest.mark.usefixtures("chunk")
def test_drafts_go_on_behind_what_was_found(served: Path, tokenizer: Any) -> None:
    ids = tokenizer.encode("for i in range(10):\n    print(i)\n" * 4)
    (expected,) = cold(served, tokenizer, [ids], **kv(8, 20))
    model = opened(served, resident=2, draft="ngram")
    for found in (0, len(ids)):
        got = answer(model, tokenizer, ids, **kv(8, 20))
        assert (got[0], got[2]) == (expected[0], found)
    model.outcore.close()


@pytest.mark.usefixtures("chunk")
def test_files_are_as_small_as_what_they_hold(tmp_path: Path, tokenizer: Any) -> None:
    """Plain before mlx-lm quantizes for the first time, and codes with their scales behind it."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    model = opened(folder, resident=1)
    answer(model, tokenizer, FIRST, **kv(4, 0))
    prefix = model.outcore.prefix
    how = KvBits(4, 32, 0, 64)
    names = prefix._names(FIRST, BLOCK, how)[1:-1]
    sizes = [sum(a.nbytes for a in prefix.blocks.read(f"{name}.kv").arrays.values()) for name in names]
    assert len(set(sizes[:4])) == len(set(sizes[4:])) == 1
    # Of float32: four bits, and two scales for 32 numbers.
    assert sizes[4] == sizes[0] * (4 / 32 + 2 / 32)
    model.outcore.close()


@pytest.mark.usefixtures("chunk")
def test_a_prompt_that_fits_only_if_nothing_is_kept_of_it_is_computed(
    served: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = opened(served, resident=1)
    given, asked = generate.make_room, []

    def little(*args: Any, kept: int = 0, **others: Any) -> int:
        asked.append(kept)
        if kept:
            raise BudgetError("no room")
        return given(*args, kept=kept, **others)

    with monkeypatch.context() as patch:
        patch.setattr(generate, "make_room", little)
        expected = answer(model, tokenizer, FIRST[:70], **kv(8, 0))
        assert asked[0] > asked[1] == 0
    assert not list(model.outcore.prefix.blocks.folder.glob("*.kv"))
    got = answer(model, tokenizer, FIRST[:70], **kv(8, 0))
    assert same(got, expected) and got[2] == 0
    model.outcore.close()


def test_the_command_combines_both(served: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--prompt", "def mean(values):\n" * 8, "--max-tokens", "4", "--kv-bits", "8"]
    flags += ["--draft", "none", "--kv-group-size", "32", "--quantized-kv-start", "0"]
    records = []
    for _ in range(2):
        status = main(["generate", str(served), *flags, "--prefix-cache", "on", "--resident", "1", "--json"])
        assert status == 0
        records.append(json.loads(capsys.readouterr().out))
    assert records[0]["tokens"] == records[1]["tokens"]
    assert records[0]["sweeps"] == records[1]["sweeps"] + 1
