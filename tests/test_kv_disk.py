"""Keys and values on disk: the bits of those in memory, whatever happens in the middle, and nothing left behind."""

from __future__ import annotations

import copy
import errno
import gc
import os
import pickle
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache as kept
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import (
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)

import outcore
import zoo
from outcore.decode.generate import generate_step
from outcore.decode.passes import MLX_LM_STEP, KvBits
from outcore.decode.preparation import prepare
from outcore.decode.speculative.drafting import Drafting
from outcore.errors import BudgetError, ClosedError, ReadError, StoreError, UsageError
from outcore.modules.cache_check import check_cache
from outcore.modules.hooks import flat
from outcore.options import LoadOptions
from outcore.plan.planner import smallest_budget
from outcore_kv import cache_store
from outcore_kv.cache_store import Offloaded
from outcore_kv.scratch import Scratch
from stand_ins import Oracle, TokensOnly

BLOCK = 64
"""Tokens of a block in these tests, but for one: mlx-lm's caches grow by four times as many."""

TOKENS = 75
"""Of a prompt: more than a block, and not whole blocks."""

Answer = list[tuple[int, mx.array]]


def blocks_of(tokens: int, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cache_store, "TOKENS", tokens)
    patch.setattr(KVCache, "step", tokens)
    patch.setattr(QuantizedKVCache, "step", tokens)


@pytest.fixture(scope="module", autouse=True)
def short_blocks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        blocks_of(BLOCK, patch)
        yield


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of its three layers have full attention."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | {"num_hidden_layers": 3})
        return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("kv") / "qwen3")


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """So many of them that keys and values of one layer at a time take much less than all."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | {"num_hidden_layers": 8})
        return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("kv") / "deep")


@contextmanager
def opened(folder: Path, kv_disk: str = "on", **options: Any) -> Iterator[Any]:
    chosen = {"memory": "2GB", "resident": 0, "slots": 2, "context": TOKENS + 20, "draft": "none"} | options
    model, _ = outcore.load_model(folder, kv_disk=kv_disk, **chosen)
    with model.outcore:
        yield model


def ids(tokens: int, begin: int = 0) -> mx.array:
    return mx.array([(7 * i * i + 3 * i) % 100 + 3 for i in range(begin, begin + tokens)], dtype=mx.int32)


def answer(model: Any, cache: list[Any], prompt: mx.array, tokens: int = 3, **options: Any) -> Answer:
    """Of TOKENS the first chunk fills no block, and the second one goes beyond it."""
    steps = generate_step(
        prompt,
        model,
        max_tokens=tokens,
        prefill_step_size=options.pop("prefill_step_size", 48),
        prompt_cache=cache,
        **options,
    )
    found = []
    for token, logprobs in steps:
        mx.eval(logprobs)
        found.append((token, mx.array(logprobs)))
    return found


def equal(a: Answer, b: Answer) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and mx.array_equal(x[1], y[1]).item() for x, y in zip(a, b, strict=True)
    )


def on_disk(cache: list[Any]) -> int:
    return sum(isinstance(c, Offloaded) for c in flat(cache))


def kv_reads(model: Any, monkeypatch: pytest.MonkeyPatch, seen: Callable[[int], object]) -> None:
    """``seen`` is called with the bytes of each read of keys and values from now on, before it; it may raise."""
    reader = model.outcore.streaming.kv._reader
    files = {fd for file in reader._files.values() for fd in (file.cached, file.direct)}
    real = reader._calls.preadv

    def preadv(fd: int, target: memoryview, offset: int) -> int:
        if fd in files:
            seen(len(target))
        return int(real(fd, target, offset))

    monkeypatch.setattr(reader._calls, "preadv", preadv)


@kept
def plain_texts(folder: Path) -> list[Answer]:
    return three_texts(folder, "off")


def three_texts(folder: Path, kv_disk: str, tokens: int = TOKENS, back: int = 25, **options: Any) -> list[Answer]:
    """A prompt, another one behind it, and a third after some was taken back, of a block too."""
    load = {k: options.pop(k) for k in ("resident", "memory", "io", "head_resident") if k in options}
    with opened(folder, kv_disk, **load) as model:
        cache = make_prompt_cache(model)
        found = [answer(model, cache, ids(tokens), **options), answer(model, cache, ids(9, 400), 2, **options)]
        assert (on_disk(cache) > 0) == (kv_disk == "on" and model.outcore.plan.kv_slot > 0)
        if trim_prompt_cache(cache, back):
            found.append(answer(model, cache, ids(9, 500), 2, **options))
        return found


TYPES = ["falcon_h1", "gemma4", "deepseek_v32", "afm7"]
"""Lists of caches, recurrent ones among them, full and sliding attention, latent attention, keys shared by layers."""


@pytest.mark.parametrize("model_type", TYPES)
def test_bits_are_those_of_keys_and_values_in_memory(model_type: str, tmp_path: Path) -> None:
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    a, b = three_texts(folder, "off"), three_texts(folder, "on")
    assert len(a) == len(b) and all(map(equal, a, b))


def test_bits_of_blocks_that_are_as_long_as_mlx_lms(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = RotatingKVCache.step  # no other's, here
    blocks_of(step, monkeypatch)
    options: dict[str, Any] = {"tokens": step + 9, "back": 20, "prefill_step_size": 160}
    assert all(map(equal, three_texts(full, "off", **options), three_texts(full, "on", **options)))


def test_bits_of_quantized_keys_and_values(full: Path) -> None:
    options = {"kv": KvBits(4, 32, 0, MLX_LM_STEP)}
    assert all(map(equal, three_texts(full, "off", **options), three_texts(full, "on", **options)))


@pytest.mark.parametrize(
    "load",
    [{"resident": 2, "io": "cached"}, {"memory": "1MB"}],
    ids=lambda o: next(iter(o)),
)
def test_bits_with_some_layers_resident_in_parts_and_through_the_page_cache(full: Path, load: dict[str, Any]) -> None:
    if "memory" in load:
        with pytest.raises(BudgetError) as refused, opened(full, **load, resident=None):
            pass
        load = {"memory": refused.value.smallest, "resident": None}
    assert all(map(equal, plain_texts(full), three_texts(full, "on", **load)))


def test_each_token_reads_whole_blocks_of_all_its_layers_once(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(full) as model:
        cache, read = make_prompt_cache(model), [0]
        answer(model, cache, ids(TOKENS), 1)
        model.outcore.streaming.drain()
        kv_reads(model, monkeypatch, lambda n: read.append(n))
        answer(model, cache, ids(1, 5), 4)
        model.outcore.streaming.drain()
        each = sum(n for _, n in model.outcore.size.kept_apart)
        # Some of the first pass's were read ahead before, and some of the next one's may be there, too; a read that
        # was cut short is counted again.
        assert 3 * BLOCK * each <= sum(read) <= 6 * BLOCK * each


@pytest.mark.parametrize("start", [TOKENS + 1, TOKENS + 10])
def test_bits_of_caches_that_are_quantized_between_tokens_and_chunks(full: Path, start: int) -> None:
    def texts(where: str) -> list[Answer]:
        options: dict[str, Any] = {"kv": KvBits(8, 32, start, MLX_LM_STEP), "prefill_step_size": 32}
        with opened(full, where) as model:
            cache, quantized = make_prompt_cache(model), []
            found = [answer(model, cache, ids(TOKENS), **options)]
            quantized.append(isinstance(cache[0], QuantizedKVCache))
            found.append(answer(model, cache, ids(38, 77), 2, **options))
            quantized.append(isinstance(cache[0], QuantizedKVCache))
            assert quantized == [start < TOKENS + 3, True] and on_disk(cache) == (len(cache) if where == "on" else 0)
            return found

    assert all(map(equal, texts("off"), texts("on")))


def test_without_its_package_keys_and_values_stay_in_memory(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outcore.engine.extensions.modules", lambda _: {})
    with pytest.raises(UsageError, match=r"kv_disk on: the package outcore_kv is missing"), opened(full):
        pass
    with opened(full, "auto") as model:
        assert not model.outcore.plan.kv_slot


@pytest.mark.parametrize(("first", "kept_tokens", "then"), [(TOKENS, 25, 50), (BLOCK + 1, BLOCK + 1, 6)])
def test_tokens_taken_back_of_the_only_layer_on_disk(full: Path, first: int, kept_tokens: int, then: int) -> None:
    """What was read ahead for it is what others have taken the place of."""

    def texts(where: str) -> list[Answer]:
        with opened(full, where, resident=2) as model:
            cache = make_prompt_cache(model)
            assert len(cache) == 3
            found = [answer(model, cache, ids(first))]
            assert on_disk(cache) == (where == "on")
            trim_prompt_cache(cache, cache[0].offset - kept_tokens)
            assert cache[0].offset == kept_tokens
            for tokens in (then, 1, 1):
                found.append(answer(model, cache, ids(tokens, 9), 2))
            return found

    assert all(map(equal, texts("off"), texts("on")))


def test_drafts_are_verified_against_keys_and_values_on_disk(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model with a recurrent layer, too. Of each three drafted tokens one is wrong."""

    prompt: Any = ids(BLOCK + 2).tolist()

    def text(**options: Any) -> list[int]:
        model, _ = outcore.load_model(quick_models(2), memory="1GB", resident=0, slots=2, govern=False, **options)
        with model.outcore:
            cache = make_prompt_cache(model)
            found = list(outcore.stream_generate(model, TokensOnly(), prompt, 8, prompt_cache=cache))
            assert on_disk(cache) == (options["kv_disk"] == "on")
            drafted = options["draft"] != "none"
            assert {r.from_draft for r in found} == ({True, False} if drafted else {False})
            assert (model.outcore.metrics.drafted > sum(r.from_draft for r in found)) == drafted
        return [r.token for r in found]

    expected = text(kv_disk="off", draft="none")
    monkeypatch.setattr(Drafting, "source", lambda *_: Oracle([*prompt, *expected], 3))
    assert text(kv_disk="on", draft="ngram") == expected


# What happens in the middle


class Broken(Exception):
    pass


@kept
def in_memory(full: Path) -> list[Answer]:
    """Three answers, one after the other, with keys and values in memory."""
    with opened(full, "off") as model:
        cache = make_prompt_cache(model)
        return [answer(model, cache, ids(TOKENS)), answer(model, cache, ids(62, 7)), answer(model, cache, ids(2))]


@kept
def three_more_in_memory(full: Path) -> Answer:
    """What answers three tokens behind TOKENS, with keys and values in memory."""
    with opened(full, "off") as model:
        cache = make_prompt_cache(model)
        answer(model, cache, ids(TOKENS), 1)
        return answer(model, cache, ids(3, 9))


@pytest.mark.parametrize(("prompt", "at"), [(True, 5), (False, 0), (False, 11)])
def test_after_an_exception_in_the_middle_of_a_pass_caches_are_what_they_were(
    full: Path, at: int, prompt: bool
) -> None:
    expected = in_memory(full)
    with opened(full) as model:
        cache, left, broken = make_prompt_cache(model), [at], 0

        def break_off() -> None:
            left[0] -= 1
            if left[0] < 0:
                left[0] = 10**9
                raise Broken

        found = [] if prompt else [answer(model, cache, ids(TOKENS))]
        model.outcore.streaming.after_unit.append(break_off)
        for piece in [ids(TOKENS), ids(62, 7), ids(2)][len(found) :]:
            left[0] = at
            try:
                found.append(answer(model, cache, piece))
            except Broken:
                broken += 1
                # Those tokens that were handed out stay, as ever; here none was.
                held = model.outcore.in_cache
                assert held == 0 or at > 3
                while cache[0].offset > sum(
                    len(p) for p in ([ids(TOKENS), ids(62, 7), ids(2)])[: len(found)]
                ) + 3 * len(found):
                    assert trim_prompt_cache(cache, 1)
                left[0] = 10**9
                found.append(answer(model, cache, piece))
        assert broken and all(map(equal, expected, found))


def test_a_read_that_fails_changes_nothing(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened(full) as model:
        cache = make_prompt_cache(model)
        answer(model, cache, ids(TOKENS), 1)
        works = [False]

        def fails(_: int) -> None:
            if not works[0]:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

        kv_reads(model, monkeypatch, fails)
        offsets = [c.offset for c in cache]
        for _ in range(2):
            with pytest.raises(ReadError, match="keys and values"):
                answer(model, cache, ids(3, 9))
            assert [c.offset for c in cache] == offsets
        works[0] = True
        assert equal(three_more_in_memory(full), answer(model, cache, ids(3, 9)))


@pytest.mark.parametrize("after", [0, 5])
def test_a_full_disk_ends_the_answer_and_nothing_else(full: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    """In the prompt, at once and after some writes, and where the answer fills a block."""
    begin = BLOCK - 6
    with opened(full, "off") as model:
        expected = answer(model, make_prompt_cache(model), ids(begin), 12)
    with opened(full) as model:
        cache, left, real = make_prompt_cache(model), [after], Scratch.write

        def write(self: Scratch, offset: int, data: memoryview) -> None:
            if not left[0]:
                raise self._failed(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), len(data))
            left[0] -= 1
            real(self, offset, data)

        monkeypatch.setattr(Scratch, "write", write)
        with pytest.raises(StoreError, match=r"No space left.*kv_dir"):
            answer(model, cache, ids(TOKENS))
        assert [c.offset for c in cache] == [0] * len(cache)
        left[0] = 10**9
        answer(model, cache, ids(begin), 2)
        left[0] = 0
        with pytest.raises(StoreError):
            answer(model, cache, mx.array([expected[2][0]]), 20)
        held = cache[0].offset
        assert begin + 2 <= held < BLOCK and {c.offset for c in cache} == {held}, "a whole block was not written"
        left[0] = 10**9
        # The cache holds the answer so far: it goes on as if nothing had been.
        following = held - begin
        rest = answer(model, cache, mx.array([expected[following][0]]), 11 - following)
        assert cache[0].offset > BLOCK and equal(expected[following + 1 :], rest)


# A cache, between sweeps


def test_a_cache_on_disk_can_be_copied_saved_and_used_in_memory(full: Path, tmp_path: Path) -> None:
    with opened(full, "off") as model:
        plain = make_prompt_cache(model)
        answer(model, plain, ids(TOKENS), 1)
    with opened(full) as model:
        cache = make_prompt_cache(model)
        answer(model, cache, ids(TOKENS), 1)
        check_cache(model.outcore.forms, cache)
        assert on_disk(cache) == len(cache) and not any(c.empty() for c in cache)
        for c, p in zip(cache, plain, strict=True):
            assert isinstance(c, KVCache) and c.offset == p.offset and c.size() == p.size() and c.nbytes == p.nbytes
            for x, y in zip(c.state[:2], p.state[:2], strict=True):
                assert mx.array_equal(x[..., : c.offset, :], y[..., : c.offset, :]).item()
        other = copy.deepcopy(cache)
        assert not on_disk(other) and all(type(c) is KVCache for c in other)
        save_prompt_cache(str(tmp_path / "saved.safetensors"), cache)
        assert on_disk(cache) == len(cache)
        loaded = load_prompt_cache(str(tmp_path / "saved.safetensors"))
        expected = three_more_in_memory(full)
        assert all(equal(expected, answer(model, each, ids(3, 9))) for each in (other, loaded, cache))
        assert on_disk(other) == len(other), "it was brought along"


def test_a_cache_of_another_model_that_keeps_its_own_on_disk(full: Path) -> None:
    expected = three_more_in_memory(full)
    with opened(full) as other:
        with opened(full) as model:
            cache, lost = make_prompt_cache(model), make_prompt_cache(model)
            for each in (cache, lost):
                answer(model, each, ids(TOKENS), 1)
            assert equal(expected, answer(other, cache, ids(3, 9))) and on_disk(cache) == len(cache)
        with pytest.raises(ClosedError):
            answer(other, lost, ids(3, 9))
        fresh = make_prompt_cache(other)
        answer(other, fresh, ids(TOKENS), 1)
        assert equal(expected, answer(other, fresh, ids(3, 9)))


def test_a_cache_on_disk_is_changed_and_copied_as_one_in_memory(full: Path) -> None:
    def texts(where: str) -> list[Answer]:
        with opened(full, where, context=175) as model:
            cache = make_prompt_cache(model)
            answer(model, cache, ids(TOKENS), 1)
            assert on_disk(cache) == (len(cache) if where == "on" else 0)
            copies = [copy.copy(c) for c in cache], pickle.loads(pickle.dumps(cache))
            found = [answer(model, c, ids(n, 9), 2) for c, n in zip(copies, (66, 5), strict=True)]
            found.append(answer(model, cache, ids(5, 9)))
            for c in cache:
                c.keys = c.keys * 2
            found.append(answer(model, cache, ids(5, 9)))
            assert not equal(*found[2:])
            return found

    assert all(map(equal, texts("off"), texts("on")))


def test_layers_that_come_back_take_their_keys_and_values_along(full: Path) -> None:
    with opened(full, "off") as model:
        cache = make_prompt_cache(model)
        expected = [answer(model, cache, ids(n, 3 * n)) for n in (TOKENS, 4, 5, 6)]
    with opened(full, resident=2) as model:
        assert len(make_prompt_cache(model)) == 3
        residency, cache = model.outcore.residency, make_prompt_cache(model)
        found = [answer(model, cache, ids(TOKENS, 3 * TOKENS))]
        assert on_disk(cache) == 1
        model.outcore.streaming.drain()
        assert residency.layers.shed(1) == 1
        found.append(answer(model, cache, ids(4, 12)))
        assert on_disk(cache) == 2
        assert residency.layers.regrow(1) == 1
        found.append(answer(model, cache, ids(5, 15)))
        residency.layers.note_arrivals()
        found.append(answer(model, cache, ids(6, 18)))
        assert on_disk(cache) == 1 and all(map(equal, expected, found))


def test_disk_is_given_back_when_a_text_is_dropped_and_all_of_it_in_the_end(full: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with opened(full, kv_dir=folder) as model:
        beside = model.outcore.streaming.kv
        file = beside._scratch._fd
        sizes = []
        for n in range(2):
            cache = make_prompt_cache(model)
            answer(model, cache, ids(TOKENS, n), 1)
            os.fsync(file)
            sizes.append(os.fstat(file).st_blocks * 512)
            if not n:
                del cache
                gc.collect()
        assert 0 < sizes[1] <= sizes[0] * 1.2, "another text takes the place of the one before"
        # A file without a name ends with the process, however that ends.
        assert list(folder.iterdir()) == [] and os.fstat(file).st_nlink == 0
        assert folder.stat().st_mode & 0o777 == 0o700
    with pytest.raises(ClosedError):
        _ = cache[0].state
    beside.close()


# When


def test_only_a_context_that_fits_in_no_other_way_goes_to_the_disk_by_itself(deep: Path) -> None:
    options: dict[str, Any] = {"context": 4000, "prompt": 66, "draft": "none"}
    with pytest.raises(BudgetError) as least:
        outcore.load_model(deep, memory="100KB", **options)
    # With all of a prompt in one reading; parts of it are not tried before the disk.
    size = prepare(deep, memory="1GB", kv_disk="off", **options).profile.size
    in_memory, apart = smallest_budget(size), least.value.smallest
    assert apart is not None and apart < in_memory
    gc.collect()
    others = mx.get_active_memory()
    for memory, there in ((in_memory, False), (in_memory - 1, True), (apart, True)):
        model, _ = outcore.load_model(deep, memory=memory, **options)
        with model.outcore as session:
            assert (session.plan.kv_slot > 0) == there == any("on disk" in note for note in session.notes)
            assert session.plan.peak_bytes <= memory
            if not there:
                continue
            mx.reset_peak_memory()
            answer(model, make_prompt_cache(model), ids(66), 2, prefill_step_size=session.plan.prefill_step)
            assert mx.get_peak_memory() - others <= memory


def test_a_text_that_outgrows_memory_goes_on_on_disk(deep: Path) -> None:
    def text(memory: int | str, **options: Any) -> tuple[list[int], bool]:
        (model, _), tokenizer = (
            outcore.load_model(deep, memory=memory, context=64, prompt=64, draft="none", **options),
            TokensOnly(),
        )
        with model.outcore as session:
            found = outcore.stream_generate(model, tokenizer, ids(420), 2, prompt_cache=make_prompt_cache(model))
            return [r.token for r in found], session.plan.kv_slot > 0

    with pytest.raises(BudgetError) as least:
        outcore.load_model(deep, memory="100KB", context=460, prompt=420, draft="none")
    assert least.value.smallest is not None
    memory = int(least.value.smallest * 1.02)
    with pytest.raises(BudgetError, match="does not fit"):
        text(memory, kv_disk="off")
    tokens, there = text(memory)
    assert there and (tokens, False) == text("1GB", kv_disk="off")


def test_a_text_that_grows_onto_a_disk_that_refuses_changes_nothing(deep: Path, tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as least:
        outcore.load_model(deep, memory="100KB", context=4100, prompt=4000, draft="none")
    assert least.value.smallest is not None
    options: dict[str, Any] = {"context": 64, "prompt": 8, "draft": "none", "kv_dir": tmp_path / "kv"}
    (model, _), tokenizer = outcore.load_model(deep, memory=int(least.value.smallest * 1.02), **options), TokensOnly()
    (tmp_path / "kv").write_text("")
    with model.outcore as session:
        texts = []
        for _ in range(2):
            texts.append([r.token for r in outcore.stream_generate(model, tokenizer, ids(20), 5)])
            before = session.plan, session.size
            with pytest.raises(StoreError, match="kv_dir"):
                list(outcore.stream_generate(model, tokenizer, ids(4000), 5))
            assert (session.plan, session.size) == before and session.unbound is None
        assert texts[0] == texts[1]


def test_what_cannot_be_meant_is_refused(full: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="kv_disk='perhaps'"):
        LoadOptions(kv_disk="perhaps")
    with pytest.raises(UsageError, match="one text at a time"):
        LoadOptions(kv_disk="on", sequences=2)
    with pytest.raises(UsageError, match="kv_dir"):
        LoadOptions(kv_dir=3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="reads all keys"), opened(full, draft="self:4"):
        pass
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="kv_dir"), opened(full, kv_dir=tmp_path / "file"):
        pass


def test_a_folder_that_cannot_be_is_refused(full: Path, tmp_path: Path) -> None:
    """Whether or not anything would lie there; and one that can be is not made before it is needed."""
    (tmp_path / "file").write_text("")
    for path, why in (("file", "it is not a folder"), ("no/kv", f"there is no folder {tmp_path / 'no'} to make it in")):
        with pytest.raises(
            StoreError, match=re.escape(f"{tmp_path / path}: keys and values cannot be stored there: {why}")
        ):
            prepare(full, memory="1GB", kv_dir=tmp_path / path)
    prepare(full, memory="1GB", kv_dir=tmp_path / "kv")
    prepare(full, memory="1GB", kv_dir=tmp_path / "no/kv", kv_disk="off")
    assert sorted(p.name for p in tmp_path.iterdir() if not p.name.startswith("outcore")) == ["file"]


def test_a_disk_without_room_is_refused_before_anything_is_read(full: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Scratch, "free_bytes", 1000)
    told = r"keys and values of 360 tokens take .* 1.00 KB may be used"
    with pytest.raises(StoreError, match=told), opened(full, context=360):
        pass


def test_a_model_without_such_caches_says_so(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("mamba2", tmp_path / "model")
    with opened(folder) as model:
        assert not model.outcore.plan.kv_slot and any("stay in memory" in note for note in model.outcore.notes)
