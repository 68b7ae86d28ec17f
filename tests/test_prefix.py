"""The prefix cache: what was computed of prompts is not computed again, whatever happened to it in between."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_logits_processors, make_sampler
from mlx_lm.tokenizer_utils import TokenizerWrapper

import outcore
import zoo
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.cli.main import main
from outcore.decode import prefix_cache as made
from outcore.decode import text_drafts
from outcore.decode.preparation import prepare
from outcore.decode.request import Request
from outcore.decode.scheduler import Scheduler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.plan.planner import smallest_budget
from outcore.serve.events import Begun, Finished, GenerationRequest
from outcore_prefix import blocks as on_disk
from outcore_prefix import prefix_cache as prompts
from outcore_prefix.blocks import BlockFiles
from stand_ins import Oracle
from test_service import heard, serving, text_of

BLOCK = 8
TEXT = [(7 * i * i + 3 * i + 1) % 60 + 1 for i in range(400)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 8 tokens: what 512 take is the same, and longer. And a disk that always has room."""
    for module in (prompts, made):
        monkeypatch.setattr(module, "GRID", BLOCK)
    monkeypatch.setattr(on_disk, "LEAST_FREE", 0)
    # Tiny models' states are larger than what they remember of few tokens.
    monkeypatch.setattr(prompts, "STATE_SHARE", 1e6)


@pytest.fixture(scope="module")
def served(quick_models: Callable[[int], Path]) -> Path:
    """A recurrent layer, and one with attention."""
    return quick_models(2)


@pytest.fixture(scope="module")
def tokenizer(served: Path) -> TokenizerWrapper:
    return load_tokenizer(served)


def opened(folder: Path, prefix_cache: int | str = "on", **options: Any) -> Any:
    options = {"memory": "500MB", "context": 600, "govern": False, "draft": "none"} | options
    return outcore.load_model(folder, prefix_cache=prefix_cache, **options)[0]


def answer(
    model: Any, tokenizer: Any, ids: list[int], tokens: int = 4, **options: Any
) -> tuple[list[int], list[Any], int, int]:
    """Tokens, their log-probabilities, and of the prompt what was found; sweeps to the first token."""
    m = model.outcore.metrics
    m.reset()
    found, logprobs, first = [], [], 0
    if model.outcore.prefix is None:
        options["prefill_step_size"] = BLOCK
    for n, r in enumerate(outcore.stream_generate(model, tokenizer, ids, max_tokens=tokens, **options)):
        first = m.sweeps if n == 0 else first
        found.append(r.token)
        logprobs.append(np.array(r.logprobs.astype(mx.float32)))
    return found, logprobs, m.prompt_found, first


def same(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    return a[0] == b[0] and all(np.array_equal(x, y, equal_nan=True) for x, y in zip(a[1], b[1], strict=True))


KINDS = ("llama4", "gpt_oss", "longcat_flash")
"""Chunks, sliding windows, several caches in one layer; recurrent states are in what the other tests have."""


def test_a_prompt_is_not_read_in_more_parts_to_be_stored(tmp_path: Path) -> None:
    folder, options = zoo.save_checkpoint("qwen3_5", tmp_path / "model"), {"context": 900, "prompt": 700}
    size = prepare(folder, memory="1GB", govern=False, draft="none", **options).profile.size
    # Room for a prompt in one reading, but not for its states, too.
    model = opened(folder, memory=smallest_budget(size) + size.states // 2, **options)
    with model.outcore as session:
        _, stored = made.room_to_record(session, 701, 700, None, 0)
        assert (stored, session.size.further_readings(session.plan.prefill_step)) == (False, 0)


@pytest.mark.parametrize(
    ("model_type", "resident"),
    [*((kind, 1) for kind in KINDS), ("rwkv7", None)],
)
def test_every_kind_of_cache_comes_back_to_the_bit(
    model_type: str, resident: int | None, tmp_path: Path, tokenizer: Any
) -> None:
    """The same prompt again after a restart, and others that begin like it; against the same without a cache."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    first, longer, edited = TEXT[:20], TEXT[:20] + TEXT[200:212], TEXT[:14] + TEXT[300:310]
    plain = opened(folder, "off", resident=resident)
    assert plain.outcore.prefix is None
    expected = [answer(plain, tokenizer, ids, 3) for ids in (first, longer, edited)]
    plain.outcore.close()
    begun = opened(folder, resident=resident)
    assert same(answer(begun, tokenizer, first, 3), expected[0])
    begun.outcore.close()
    again = opened(folder, resident=resident)
    got = [answer(again, tokenizer, ids, 3) for ids in (first, longer, edited)]
    assert all(map(same, got, expected))
    assert [g[2] for g in got[:2]] == [20, 16]
    assert resident is None or [g[3] for g in got] == [0, 1, 1]
    again.outcore.close()


def test_caches_of_another_kind_are_not_kept(tmp_path: Path, tokenizer: Any) -> None:
    model = opened(zoo.save_checkpoint("deepseek_v41", tmp_path / "model"), resident=1)
    first, second = (answer(model, tokenizer, TEXT[:20], 2) for _ in range(2))
    assert same(first, second) and (first[2], second[2]) == (0, 0)
    model.outcore.close()


def test_it_says_so_where_quantized_keys_and_values_are_not_kept(served: Path, tokenizer: Any) -> None:
    model = opened(served)
    for _ in range(2):
        assert answer(model, tokenizer, TEXT[:20], 2, kv_bits=8, kv_group_size=32, quantized_kv_start=6)[2] == 0
    assert [n for n in model.outcore.notes if n.startswith("prefix cache: with kv_bits")]
    model.outcore.close()


def test_a_prompt_that_was_answered_needs_no_pass(served: Path, tokenizer: Any) -> None:
    """To its first token; and its answer, sampled or with penalties, is the one that it had."""
    ids = tokenizer.encode("def mean(some, values):\n    return sum(values) / len(values)\n")
    assert len(ids) > 2 * BLOCK
    ways: list[Callable[[], dict[str, Any]]] = [
        dict,
        lambda: {"sampler": make_sampler(0.9, top_p=0.95)},
        lambda: {"logits_processors": make_logits_processors(repetition_penalty=1.3, repetition_context_size=200)},
    ]
    model, plain = opened(served, resident=1), opened(served, "off", resident=1)
    expected = []
    for way in ways:
        mx.random.seed(7)
        expected.append(answer(plain, tokenizer, ids, **way()))
        mx.random.seed(7)
        assert same(answer(model, tokenizer, ids, **way()), expected[-1])
    assert not any(itertools.starmap(same, itertools.combinations(expected, 2)))
    model.outcore.close()
    plain.outcore.close()
    again = opened(served, resident=1)
    for way, one in zip(ways, expected, strict=True):
        mx.random.seed(7)
        warm = answer(again, tokenizer, ids, **way())
        assert warm[2:] == (len(ids), 0) and same(warm, one)
    again.outcore.close()


def test_drafts_know_the_whole_text(served: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what was found of it: guesses that count its tokens are right but for every third."""
    ids = TEXT[:20]
    plain = opened(served, "off", resident=1)
    expected = answer(plain, tokenizer, ids, 8)[0]
    plain.outcore.close()
    monkeypatch.setattr(Drafting, "source", lambda *_: Oracle([*ids, *expected], 3))
    monkeypatch.setattr(text_drafts, "DraftLengthPolicy", lambda *_: DraftLengthPolicy(5, fixed=True))
    model = opened(served, resident=1, draft="ngram")
    accepted = []
    for found in (0, len(ids)):
        got = answer(model, tokenizer, ids, 8)
        assert (got[0], got[2]) == (expected, found)
        accepted.append(model.outcore.metrics.accepted)
    assert accepted[0] == accepted[1] > 0
    model.outcore.close()


def test_a_text_that_goes_on_with_a_cache_finds_the_prompt_in_it(served: Path, tokenizer: Any) -> None:
    ids, more = TEXT[:20], TEXT[100:106]

    def conversation(model: Any) -> tuple[list[int], list[int], int]:
        cache = make_prompt_cache(model)
        first = [r.token for r in outcore.stream_generate(model, tokenizer, ids, max_tokens=3, prompt_cache=cache)]
        held = model.outcore.in_cache
        second = [r.token for r in outcore.stream_generate(model, tokenizer, more, max_tokens=3, prompt_cache=cache)]
        return first, second, held

    plain = opened(served, "off", resident=1, prefill_step_size=BLOCK)
    expected = conversation(plain)
    plain.outcore.close()
    model = opened(served, resident=1)
    assert conversation(model) == conversation(model) == expected
    assert model.outcore.metrics.prompt_found == 20
    model.outcore.close()


def test_a_prompt_that_fails_leaves_what_was_there(
    served: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error in its sweep, or in choosing its first token: nothing of it is in the caller's caches."""
    ids = TEXT[:20]
    model = opened(served, resident=1)
    expected = answer(model, tokenizer, ids)
    cache = make_prompt_cache(model)

    def fails(_: Any) -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        list(outcore.stream_generate(model, tokenizer, ids + TEXT[:6], max_tokens=3, prompt_cache=cache, sampler=fails))
    assert model.outcore.in_cache == 0 and all(c.empty() for c in cache)
    got = answer(model, tokenizer, ids, prompt_cache=cache)
    assert same(got, expected) and not cache[1].empty()
    model.outcore.close()


def test_other_models_and_ways_of_computing_find_nothing(served: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = opened(served)
    answer(model, tokenizer, TEXT[:20])
    model.outcore.close()
    other = zoo.save_checkpoint("llama", tmp_path / "other")
    for folder, options in ((served, {"dtype": "bfloat16"}), (other, {}), (served, {"prefill_step_size": 4})):
        model = opened(folder, **options)
        assert answer(model, tokenizer, TEXT[:20])[2] == 0
        model.outcore.close()
    # Chunks that blocks end in the middle of, and what cannot be kept.
    model = opened(served, prefill_step_size=7)
    assert model.outcore.prefix is None
    model.outcore.close()
    model = opened(served)
    for _ in range(2):
        assert answer(model, tokenizer, TEXT[:20], max_kv_size=32)[2] == 0
    model.outcore.close()


def test_sequences_that_come_and_go_find_their_prompts(served: Path, tokenizer: Any) -> None:
    """One alone keeps what it computes; others join with what is there, and share sweeps."""
    prompts_ = [TEXT[:36], TEXT[:36] + TEXT[200:206], TEXT[:24] + TEXT[300:310], TEXT[50:60]]

    def run(model: Any) -> tuple[dict[int, list[int]], dict[int, int]]:
        sequences = Scheduler(model, prefill_step=None if model.outcore.prefix is not None else BLOCK)
        said: dict[int, list[int]] = {}
        found: dict[int, int] = {}
        for uid, ids in enumerate(prompts_):
            sequences.add(Request(uid, ids, 5))
            while sequences.running or sequences.waiting:
                step = sequences.step()
                found |= step.found
                for token in step.tokens:
                    said.setdefault(token.uid, []).append(token.token)
                sequences.remove([uid for uid, tokens in said.items() if len(tokens) >= 5])
                if uid and sequences.running:
                    break
        while sequences.running or sequences.waiting:
            step = sequences.step()
            found |= step.found
            for token in step.tokens:
                said[token.uid] = [*said.get(token.uid, []), token.token]
            sequences.remove([uid for uid, tokens in said.items() if len(tokens) >= 5])
        sequences.close()
        return said, found

    plain = opened(served, "off", resident=1)
    expected, _ = run(plain)
    plain.outcore.close()
    model = opened(served, resident=1)
    said, found = run(model)
    assert said == expected and found[1] == 32
    again, found = run(model)
    assert again == expected and found[0] == 36 and found[1] >= 32
    model.outcore.close()


def test_a_server_says_what_it_did_not_compute(served: Path) -> None:
    asked = GenerationRequest(prompt="def add(a, b):\n    return a + b\n" * 2, max_tokens=3)
    with serving(served, prefix_cache="on") as service:
        first, second = (asyncio.run(heard(service, asked)) for _ in range(2))
    tokens = [[(e.prompt_tokens, e.cached_tokens) for e in events if isinstance(e, Begun | Finished)]
              for events in (first, second)]  # fmt: skip
    count = tokens[0][0][0]
    assert tokens == [[(count, 0)] * 2, [(count, count)] * 2] and text_of(first) == text_of(second)


# Files


def one_block(name: str = "x", **options: Any) -> tuple[BlockFiles, Path]:
    kept = BlockFiles("model-0000000000000000-00000000", **options)
    arrays = {
        "0.k": mx.arange(48).reshape(1, 2, 3, 8).astype(mx.bfloat16),
        "logits": mx.ones((1, 5)),
        "e": mx.zeros((0, 2)),
    }
    assert kept.write(name, arrays, {"0": "[1, null]"})
    return kept, kept.folder / name


def test_a_file_is_read_as_it_was_written_by_its_user_alone() -> None:
    kept, path = one_block()
    block = kept.read("x")
    assert block is not None and block.notes == {"0": "[1, null]"}
    assert (
        block.arrays["0.k"].dtype == mx.bfloat16
        and block.arrays["0.k"].tolist() == mx.arange(48).reshape(1, 2, 3, 8).tolist()
    )
    assert block.arrays["e"].shape == (0, 2) and [*path.parent.iterdir()] == [path]
    modes = [stat.S_IMODE(p.stat().st_mode) for p in (path, path.parent, path.parent.parent)]
    assert modes == [0o600, 0o700, 0o700]


def test_any_bit_that_flips_makes_a_miss_and_so_does_any_cut() -> None:
    kept, path = one_block()
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ (1 << at % 8)]) + whole[at + 1 :])
        assert kept.read("x") is None and not path.exists(), at
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        assert kept.read("x") is None
    path.write_bytes(whole + b"\0")
    assert kept.read("x") is None
    path.write_bytes(whole)
    path.rename(path.with_name("y"))
    assert kept.read("y") is None, "of another name"
    path.mkdir()
    assert kept.read("x") is None and path.is_dir()


def test_damaged_blocks_are_computed_again(served: Path, tokenizer: Any) -> None:
    """The longest prefix that is whole is used."""
    model = opened(served, resident=1)
    expected = answer(model, tokenizer, TEXT[:45])
    rng = random.Random(5)
    folder = model.outcore.prefix.blocks.folder
    for _ in range(2):
        path = rng.choice(sorted(folder.iterdir()))
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        assert same(answer(model, tokenizer, TEXT[:45]), expected)
    model.outcore.close()


def test_what_was_used_longest_ago_goes_first_and_of_a_prompt_its_end(served: Path, tokenizer: Any) -> None:
    model = opened(served, resident=1)
    kept = model.outcore.prefix.blocks
    answer(model, tokenizer, TEXT[:45])
    answer(model, tokenizer, TEXT[100:145])
    time.sleep(0.02)
    got = answer(model, tokenizer, TEXT[:45])
    assert got[2] == 45
    total = sum(p.stat().st_size for p in kept.folder.iterdir())
    least = total
    while least > total // 4:
        least = int(least * 0.8)
        kept._most = least
        kept.drop()
        assert sum(p.stat().st_size for p in kept.folder.iterdir()) <= least
    assert model.outcore.prefix.find(TEXT[100:145], BLOCK) is None
    names = model.outcore.prefix._names(TEXT[:45], BLOCK)
    there = [kept.has(f"{name}.kv") for name in names[1:-1]]
    assert there == sorted(there, reverse=True) and there[0]
    model.outcore.close()


def test_nothing_is_written_where_there_is_no_room(
    served: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_disk, "LEAST_FREE", 1 << 60)
    model = opened(served)
    expected = answer(model, tokenizer, TEXT[:20])
    assert not [p for p in model.outcore.prefix.blocks.folder.iterdir() if p.is_file()]
    monkeypatch.setattr(on_disk, "LEAST_FREE", 0)

    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(on_disk, "array_bytes", full)
        assert same(answer(model, tokenizer, TEXT[:20]), expected)
    assert not [p for p in model.outcore.prefix.blocks.folder.iterdir() if p.is_file()]
    assert same(answer(model, tokenizer, TEXT[:20]), expected)
    assert answer(model, tokenizer, TEXT[:20])[2] == 20
    model.outcore.close()
    small = opened(served, 1000)
    answer(small, tokenizer, TEXT[70:90])
    assert small.outcore.prefix.find(TEXT[70:90], BLOCK) is None
    small.outcore.close()


BUSY = """
import os, random, mlx.core as mx
from outcore_prefix.blocks import BlockFiles
other = os.fork()
random.seed(bool(other))
kept, read = BlockFiles("model-0000000000000000-00000000", 60_000), 0
for _ in range(40):
    value = random.randrange(40)
    kept.write(f"{value}.kv", {"0.k": mx.full((1, 1, 16, 32), value, mx.float32)})
    read += kept.read(f"{random.randrange(40)}.kv") is not None
    kept.drop()
for n in range(40):
    block = kept.read(f"{n}.kv")
    assert block is None or mx.all(block.arrays["0.k"] == n)
assert read > 5
if other:
    assert os.waitpid(other, 0)[1] == 0
"""
"""Two processes write, read and drop."""


def test_processes_share_files_without_a_word() -> None:
    subprocess.run([sys.executable, "-c", BUSY], check=True, timeout=50)
    kept = BlockFiles("model-0000000000000000-00000000", 60_000)
    kept.drop()
    files = list(kept.folder.iterdir())
    assert files and sum(p.stat().st_size for p in files) <= 60_000 and not [p for p in files if p.name[0] == "."]


def test_the_cache_command_lists_verifies_and_removes_prompts(
    served: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = opened(served)
    answer(model, tokenizer, TEXT[:20])
    folder = model.outcore.prefix.blocks.folder
    model.outcore.close()

    def run(*arguments: str) -> tuple[int, Any]:
        return main(["cache", *arguments, "--json"]), json.loads(capsys.readouterr().out)

    status, said = run("ls")
    (entry,) = [e for e in said["entries"] if e["kind"] == "prompts"]
    assert status == 0 and entry["bytes"] == sum(p.stat().st_size for p in folder.iterdir())
    status, said = run("rm", entry["name"])
    assert status == 0 and not folder.exists()


def test_bounded_caches_of_a_caller_are_not_shared(tmp_path: Path, tokenizer: Any) -> None:
    """Of a model whose own are plain: nothing is found for them, and nothing kept of them."""
    folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    plain = opened(folder, "off")
    expected = answer(plain, tokenizer, TEXT[:20])
    plain.outcore.close()
    model = opened(folder)

    def bounded() -> list[Any]:
        return [RotatingKVCache(max_size=12) for _ in model.layers]

    for found in (0, 20):
        first, second = (answer(model, tokenizer, TEXT[:20], prompt_cache=bounded()) for _ in range(2))
        assert same(first, second) and (first[2], second[2]) == (0, 0)
        got = answer(model, tokenizer, TEXT[:20])
        assert same(got, expected) and got[2] == found
    model.outcore.close()


def test_the_callers_own_caches_are_filled(served: Path, tokenizer: Any) -> None:
    model = opened(served, resident=1)
    expected = answer(model, tokenizer, TEXT[:45], prompt_cache=make_prompt_cache(model))
    mine = make_prompt_cache(model)
    assert same(answer(model, tokenizer, TEXT[:45], prompt_cache=tuple(mine)), expected)
    assert mine[1].offset == model.outcore.in_cache == 49
    model.outcore.close()


def test_a_prompt_that_never_fits_takes_no_room_from_others(served: Path, tokenizer: Any, tmp_path: Path) -> None:
    model = opened(served)
    answer(model, tokenizer, TEXT[:20])
    model.outcore.close()
    folder = Path(os.environ["OUTCORE_CACHE"]) / "prefix"
    before = {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()}
    other = opened(zoo.save_checkpoint("llama", tmp_path / "other"), 30_000)
    answer(other, tokenizer, TEXT[:300])
    other.outcore.close()
    assert {p: p.stat().st_size for p in folder.rglob("*") if p.is_file()} == before


def test_a_prompt_that_was_kept_once_goes_from_its_end(served: Path, tokenizer: Any) -> None:
    model = opened(served)
    answer(model, tokenizer, TEXT[:45])
    kept = model.outcore.prefix.blocks
    names = model.outcore.prefix._names(TEXT[:45], BLOCK)
    left = {p.name: p.stat().st_mtime_ns for p in kept.folder.iterdir()}
    assert sorted(left, key=left.__getitem__)[-6:] == [f"{names[-1]}.end", *(f"{n}.kv" for n in names[-2:0:-1])]
    kept._most = sum((kept.folder / f"{n}.kv").stat().st_size for n in names[1:-1])
    kept.drop()
    there = [kept.has(f"{name}.kv") for name in names[1:-1]]
    assert there[0] and there == sorted(there, reverse=True) and not kept.has(f"{names[-1]}.end")
    model.outcore.close()
