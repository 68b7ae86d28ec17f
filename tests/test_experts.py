"""Routed experts that are read one by one: the resident model's bits with any number of them in memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import mlx_lm.utils
import numpy as np
import numpy.typing as npt
import pytest
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.decode import one_text, preparation
from outcore.decode.speculative.drafting import Drafting
from outcore.disk.metrics import Metrics
from outcore.disk.reader import FileReader
from outcore.engine.session import Session
from outcore.errors import ReadError, UsageError
from outcore.machine.allocator import move
from outcore.modules.layers import is_stacked
from outcore.sizes import BLOCK
from outcore_experts import expert_prefetch, expert_windows
from outcore_experts import experts as on_demand
from outcore_experts.device_stretches import CudaDriver, DeviceMemory
from outcore_experts.expert_cache import CachedSwitch, ExpertReads
from outcore_experts.expert_plan import hit_rate, reads_experts
from outcore_experts.expert_policy import ExpertPolicy
from outcore_experts.expert_prefetch import ExpertPrefetch
from rank_work import Told

EXPERTS, USED = 16, 4

KINDS = (
    "deepseek_v3", "gemma4_text", "phixtral", "gpt_oss", "llama4", "longcat_flash", "nemotron_h", "qwen3_5_moe",
)  # fmt: skip
"""Switches of both classes, with biases, two in a layer or none in some, with scaled inputs, with experts that are
none; ``benchmarks/equality.py --experts 2`` holds every type."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """Two layers with 16 experts each, so large that some are read by blocks of their own, and a tokenizer."""
    text = zoo.CONFIGS["qwen3_5_moe"]["text_config"] | {
        "num_experts": EXPERTS, "num_experts_per_tok": USED, "hidden_size": 128, "moe_intermediate_size": 128,
        "num_hidden_layers": 2,
        "mlp_only_layers": [], "vocab_size": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("experts") / "model"
    with pytest.MonkeyPatch.context() as patch:
        whole = {"text_config": text, "vocab_size": 8192, "tie_word_embeddings": True}
        patch.setitem(zoo.CONFIGS, "qwen3_5_moe", zoo.CONFIGS["qwen3_5_moe"] | whole)
        zoo.save_checkpoint("qwen3_5_moe", folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model / name).read_bytes())
    return folder


IDS = [(7 * i * i + 3 * i + 1) % 60 + 1 for i in range(90)]


def logits(model: Any, passes: Sequence[int]) -> npt.NDArray[np.float32]:
    """Of passes of so many tokens."""
    cache, found, at = make_prompt_cache(model), [], 0
    for n in passes:
        out = model(mx.array(IDS[at : at + n])[None], cache=cache)
        found.append(np.array(out.astype(mx.float32))[0])
        at += n
    return np.concatenate(found)


PASSES = (17, 1, 3, 1)
"""From 16 tokens on, which use 4 experts each, mlx-lm sorts their numbers."""

SHORT = (6, 1, 3, 1)


@functools.cache
def expected(folder: Path, passes: Sequence[int] = PASSES) -> npt.NDArray[np.float32]:
    """Of mlx-lm's own model, all in memory and computed in float32."""
    theirs, _ = mlx_lm.utils.load_model(folder)
    theirs.set_dtype(mx.float32)
    return logits(theirs, passes)


def held(folder: Path, experts: int, **options: Any) -> Any:
    options = {"memory": "1GB", "context": 128, "govern": False} | options
    return outcore.load_model(folder, experts=experts, **options)[0]


@pytest.mark.parametrize(
    ("model_type", "quantize"),
    [(kind, (None, {"group_size": 32, "bits": 4})[n % 2]) for n, kind in enumerate(KINDS)],
)
def test_every_kind_of_switch(model_type: str, quantize: dict[str, int] | None, tmp_path: Path) -> None:
    """At two slots, which is what a token uses, or fewer than that; and at one."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model", quantize=quantize)
    theirs, _ = mlx_lm.utils.load_model(folder)
    want = logits(theirs, SHORT)
    model = held(folder, 2)
    session: Session = model.outcore
    for slots in (2, 1):
        assert session.plan.pools and all(n == slots for _, n in session.plan.pools)
        assert np.array_equal(logits(model, SHORT), want)
        assert 0 < session.metrics.experts.read <= session.metrics.experts.used
        if slots == 2:
            session.residency.layers.give(10**12)
            session.metrics.reset()
    session.close()


def test_without_its_package_experts_are_streamed_with_their_layer(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outcore.engine.extensions.modules", lambda _: {})
    with pytest.raises(UsageError, match="needs the package outcore_experts, which is missing"):
        held(folder, 2)
    model, _ = outcore.load_model(folder, memory="1GB", resident=1, context=128, govern=False)
    with model.outcore as session:
        assert session.plan.streams and not session.plan.pools
        assert np.array_equal(logits(model, PASSES), expected(folder))


@pytest.mark.parametrize("mode", ["mxfp4", "nvfp4"])
def test_quantizations_with_scales_of_their_own(mode: str, tmp_path: Path) -> None:
    size = 16 if mode == "nvfp4" else 32
    folder = zoo.save_checkpoint("gpt_oss", tmp_path / "model", quantize={"group_size": size, "bits": 4, "mode": mode})
    theirs, _ = mlx_lm.utils.load_model(folder)
    model = held(folder, 2)
    assert np.array_equal(logits(model, SHORT), logits(theirs, SHORT))
    model.outcore.close()


@pytest.mark.parametrize(("experts", "io"), [(1, "direct"), (6, "cached")])
def test_any_number_of_slots(folder: Path, experts: int, io: str) -> None:
    model = held(folder, experts, io=io)
    assert np.array_equal(logits(model, PASSES), expected(folder))
    model.outcore.close()


def test_experts_that_are_cast_on_their_way(tmp_path: Path) -> None:
    folder = zoo.save_checkpoint("qwen3_5_moe", tmp_path / "model", dtype=mx.bfloat16)
    for experts in (1, 3):
        model = held(folder, experts, dtype="float32")
        assert np.array_equal(logits(model, SHORT), expected(folder, SHORT))
        model.outcore.close()


@pytest.mark.parametrize("experts", [None, 4], ids=["resident", "pools"])
def test_weights_that_a_checkpoint_keeps_in_one_tensor_lie_row_by_row(
    folder: Path, experts: int | None, tmp_path: Path
) -> None:
    """Slices of it do not, and MLX's gathers on GPUs compute wrong numbers with them (``is_stacked``)."""
    fused = tmp_path / "model"
    shutil.copytree(folder, fused, ignore=shutil.ignore_patterns("*.index.json"))
    weights = dict(mx.load(str(fused / "model.safetensors")))  # type: ignore[arg-type]
    for name in [n for n in weights if "gate_proj" in n and "switch_mlp" in n]:
        prefix = name.removesuffix(".switch_mlp.gate_proj.weight")
        pair = [weights.pop(f"{prefix}.switch_mlp.{k}_proj.weight") for k in ("gate", "up")]
        weights[f"{prefix}.experts.gate_up_proj"] = mx.concatenate(pair, axis=-2)
        weights[f"{prefix}.experts.down_proj"] = weights.pop(f"{prefix}.switch_mlp.down_proj.weight")
    mx.eval(weights)
    mx.save_safetensors(str(fused / "model.safetensors"), weights, {"format": "mlx"})
    theirs, _ = mlx_lm.utils.load_model(fused)
    gate = theirs.layers[0].mlp.switch_mlp.gate_proj.weight
    assert memoryview(gate).strides[0] == 2 * gate.nbytes // EXPERTS  # so it is there: nothing to mend otherwise
    model, _ = outcore.load_model(fused, memory="1GB", experts=experts, context=128, govern=False)
    assert np.array_equal(logits(model, SHORT), logits(theirs, SHORT))
    assert (not model.outcore.plan.pools) == (experts is None)
    if experts is None:
        assert all(memoryview(m.weight).c_contiguous for m in model.modules() if is_stacked(m))
    model.outcore.close()


def test_counters_are_the_policys_simulation(folder: Path) -> None:
    theirs, _ = mlx_lm.utils.load_model(folder)
    trace: dict[int, list[npt.NDArray[np.int64]]] = {}
    switches = [layer.mlp.switch_mlp for layer in theirs.layers]
    cls = type(switches[0])
    original = cls.__call__

    def noted(self: Any, x: mx.array, indices: mx.array) -> mx.array:
        trace.setdefault(next(i for i, s in enumerate(switches) if s is self), []).append(np.array(indices)[0])
        return original(self, x, indices)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cls, "__call__", noted)
        logits(theirs, [1] * 12)
    for slots in (2, 10):
        used = read = 0
        for calls in trace.values():
            policy = ExpertPolicy(EXPERTS, slots)
            for call in calls:
                policy.used(call.astype(np.int64))
                for group in policy.groups(set(call.ravel().tolist())):
                    used, read = used + len(group.experts), read + len(group.loads)
                    policy.placed(group.loads)
        model = held(folder, slots)
        model.outcore.streaming.experts.prefetch = None
        logits(model, [1] * 12)
        assert (model.outcore.metrics.experts.used, model.outcore.metrics.experts.read) == (used, read)
        model.outcore.close()


def test_a_prompt_reads_each_expert_once_at_most_and_leaves_those_it_used_most(folder: Path) -> None:
    model = held(folder, 12)
    session: Session = model.outcore
    whole = sum(u.unit.read_bytes for u in session.streaming.layers.units)  # type: ignore[union-attr]
    before = session.metrics.bytes_read
    logits(model, [40])
    ring = session.plan.slots * session.plan.slot_bytes
    blocks = 2 * BLOCK * sum(len(u.unit.extents) for u in session.streaming.layers.units)  # type: ignore[union-attr]
    assert session.metrics.bytes_read - before <= whole + ring + blocks
    assert session.metrics.experts.used == 0
    mx.eval(model(mx.array([[5]]), cache=make_prompt_cache(model)))
    assert session.metrics.experts.used > 0
    cold = held(folder, 12)
    mx.eval(cold(mx.array([[5]]), cache=make_prompt_cache(cold)))
    assert session.metrics.experts.read < cold.outcore.metrics.experts.read / 2
    # The next one finds most of what it needs in the pools.
    before = session.metrics.bytes_read
    logits(model, [40])
    assert session.metrics.bytes_read - before < 0.6 * whole
    for each in (model, cold):
        each.outcore.close()


PROMPT = IDS[:9]


@functools.cache
def text(folder: Path) -> list[int]:
    """mlx-lm's tokens."""
    theirs, tokenizer = mlx_lm.load(str(folder))
    return [r.token for r in mlx_lm.stream_generate(theirs, tokenizer, PROMPT, max_tokens=10)]


def test_texts_are_mlx_lms(folder: Path) -> None:
    model, ours = outcore.load(str(folder), memory="1GB", experts=3, draft="none", govern=False)
    with model.outcore as session:
        for _ in range(2):
            assert [r.token for r in outcore.stream_generate(model, ours, PROMPT, max_tokens=10)] == text(folder)
        assert session.metrics.experts.read > 0


def test_sequences_share_pools(folder: Path) -> None:
    theirs, tokenizer = mlx_lm.load(str(folder))
    prompts = [tokenizer.encode(text) for text in ("def f(x):", "import os", "x = [1, 2,")]
    alone = [mlx_lm.generate(theirs, tokenizer, p, max_tokens=4) for p in prompts]
    model, ours = outcore.load(str(folder), memory="1GB", experts=10, sequences=3, draft="none", govern=False)
    with model.outcore as session:
        found = outcore.batch_generate(model, ours, prompts, max_tokens=4)
        assert [text.strip() for text in found.texts] == [text.strip() for text in alone]
        assert session.metrics.experts.used > session.metrics.experts.read > 0


def test_drafts_know_what_the_experts_of_their_blocks_take(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one pass for all drafted tokens, as some GPUs compute them; here experts take a day."""
    planning, sizes = preparation.Planning, list[int]()

    class Knows(Drafting):
        def source(self, control: Any, *_: Any) -> Any:
            draft = control.draft

            def noted(*args: Any) -> Any:
                sizes.append(len(found := draft(*args)))
                return found

            control.draft = noted
            return Told(text(folder), len(PROMPT))

    def in_blocks(size: Any, kind: Any, draft: Any, options: Any, _: bool, most: int) -> Any:
        return planning(size, kind, draft, options, True, most)

    monkeypatch.setattr(one_text, "on_cpu", lambda: False)
    monkeypatch.setattr(preparation, "Planning", in_blocks)
    monkeypatch.setattr(on_demand.Experts, "expert_s", 86400.0)
    model, ours = outcore.load(str(folder), memory="1GB", experts=8, draft="ngram", govern=False)
    with model.outcore as session:
        session.drafting = Knows()
        assert [r.token for r in outcore.stream_generate(model, ours, PROMPT, max_tokens=10)] == text(folder)
        # First a pass without, then one guess: more would be made if nothing were known of experts.
        assert sizes[:2] == [0, 1] and session.plan.pools and session.metrics.experts.brought > 0
        assert session.acceptance.experts.seen == len(sizes)


def test_pools_that_shrink_and_grow_in_the_middle_of_an_answer(folder: Path) -> None:
    model, ours = outcore.load(str(folder), memory="1GB", experts=12, draft="none", govern=False)
    session: Session = model.outcore
    residency = session.residency
    assert residency is not None
    whole, found, sizes = session.plan.pool_bytes, [], []
    for n, r in enumerate(outcore.stream_generate(model, ours, PROMPT, max_tokens=10)):
        found.append(r.token)
        if n == 2:
            before = mx.get_active_memory()
            count, said = residency.layers.give(whole // 2)
            assert count and said == f"{count} experts shed"
            assert mx.get_active_memory() <= before - whole // 3
            sizes.append(session.streaming.experts.slots)  # type: ignore[union-attr]
        elif n == 6:
            assert residency.layers.take(whole) == (count, f"{count} experts taken back")
            sizes.append(session.streaming.experts.slots)  # type: ignore[union-attr]
    assert found == text(folder)
    assert max(sizes[0]) <= 6 and min(sizes[1]) == 12
    model.outcore.close()


class Eager(ExpertPrefetch):
    """Foresees whatever it can, as if the disk had nothing else to do."""

    def routed(self, switch: CachedSwitch, wanted: set[int]) -> None:
        super().routed(switch, wanted)
        self._credit, self._on, self._stall, self._idle = 4.0, True, 1.0, 0.0


@pytest.mark.parametrize("model_type", KINDS[::2][:2])
def test_what_is_predicted_changes_no_bit(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "ExpertPrefetch", Eager)
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    theirs, _ = mlx_lm.utils.load_model(folder)
    model = held(folder, 3)
    assert np.array_equal(logits(model, SHORT), logits(theirs, SHORT))
    m = model.outcore.metrics
    assert m.experts.foreseen >= m.experts.wasted
    model.outcore.close()


def test_experts_are_predicted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a slow disk brings them after they are predicted for, or to be given up."""
    monkeypatch.setattr(on_demand, "ExpertPrefetch", Eager)
    model = held(folder, 6, io="cached")
    model.outcore.streaming.ring.reader.move = lambda target, source: (time.sleep(0.002), move(target, source))
    assert np.array_equal(logits(model, PASSES), expected(folder))
    assert np.array_equal(logits(model, PASSES[::-1]), expected(folder, PASSES[::-1]))
    m = model.outcore.metrics
    assert m.experts.foreseen > 0 and m.experts.wasted < m.experts.foreseen
    before = m.experts.read
    model.outcore.streaming.experts.prefetch = None
    m.reset()
    assert np.array_equal(logits(model, PASSES), expected(folder))
    assert before and not m.experts.foreseen
    model.outcore.close()


@pytest.mark.parametrize("useful", [True, False])
def test_predicting_goes_on_where_it_makes_passes_shorter(folder: Path, useful: bool) -> None:
    now = 0.0
    reads = ExpertReads(Metrics(), "cpu")
    reads.expert_s = 0.001
    look, found = ExpertPrefetch([], reads, Metrics(clock=lambda: now)), []
    switch: Any = object()
    for sweep in range(expert_prefetch.CYCLE + expert_prefetch.TRIED):
        look.begin()
        for _ in range(10):
            look.routed(switch, set())
            now += 0.002 if look._on is useful else 0.003
            look.read()
            now += 0.001
        found.append(look._on)
        assert sweep >= expert_prefetch.RUN or look._on
    tried = found[: expert_prefetch.TRIED]
    assert tried.count(True) == tried.count(False)
    assert set(found[expert_prefetch.TRIED : expert_prefetch.CYCLE]) == {useful}
    assert found[expert_prefetch.CYCLE :] == tried


def test_a_predicted_read_that_fails_is_made_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_demand, "ExpertPrefetch", Eager)
    model = held(folder, 6)
    whole, failed = ExpertReads.prefetch, []

    def prefetch(self: ExpertReads, switch: CachedSwitch, loads: Any) -> None:
        whole(self, switch, loads)
        for expert, slot in loads:
            read = switch.arriving[expert]
            read.wait_quietly()
            if slot % 2:
                switch.cache.move(switch.cache.place(0, slot), memoryview(bytearray(len(switch.cache.place(0, slot)))))
                read.error = ReadError("the disk fails")
                failed.append(expert)

    monkeypatch.setattr(ExpertReads, "prefetch", prefetch)
    assert np.array_equal(logits(model, PASSES), expected(folder))
    assert failed
    model.outcore.close()


def test_a_pool_of_all_experts_waits_for_no_router(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = held(folder, EXPERTS)
    want = expected(folder)
    assert np.array_equal(logits(model, PASSES), want)
    m = model.outcore.metrics
    m.reset()

    def waits(self: on_demand.ExpertIndices) -> npt.NDArray[np.int64]:
        raise AssertionError("somebody predicted which experts are used")

    monkeypatch.setattr(on_demand.ExpertIndices, "by_token", waits)
    assert np.array_equal(logits(model, PASSES), want)
    assert m.bytes_read == 0 and m.stall_s == 0
    monkeypatch.undo()
    streaming = model.outcore.streaming
    layers = len(streaming.experts.slots)
    for slots in (5, EXPERTS):
        streaming.drain()
        streaming.experts.resize([slots] * layers)
        assert np.array_equal(logits(model, PASSES), want)
    session = model.outcore
    session.stream(session.plan)  # as when the other weights change, by a longer text or an image
    assert np.array_equal(logits(model, PASSES), want)
    session.close()


@pytest.mark.parametrize("shape", [(1, 1, 8), (1, 3, 4), (2, 1, 7), (1, 40, 8), (6,)])
@pytest.mark.parametrize("scalars", [None, mx.uint8, mx.uint16])
def test_numbers_come_in_order_in_arrays_of_any_size(shape: tuple[int, ...], scalars: mx.Dtype | None) -> None:
    rng = np.random.default_rng(0)
    expected = rng.integers(0, 256, shape)
    numbers = on_demand.ExpertIndices(mx.array(expected.astype(np.uint32)), scalars=scalars)
    assert np.array_equal(numbers.by_token(), expected.reshape(-1, shape[-1]))
    if scalars is not None and expected.size <= on_demand.MOST_SCALARS:
        assert all(a.nbytes <= on_demand.SCALAR for a in numbers.arrays)


class FakeDriver(CudaDriver):
    """CUDA's calls without a device; it refuses copies once it is ``broken``."""

    def __init__(self) -> None:
        self.kept, self.copies, self.streams, self.broken = 0, 0, 0, False

    def keep(self, address: int, nbytes: int) -> None:
        self.kept += nbytes

    def stream(self) -> Any:
        self.streams += 1
        return object()

    def copy(self, target: int, source: int, nbytes: int, stream: Any) -> None:
        self.copies += 1
        if self.broken:
            raise OSError("CUDA error 700")
        ctypes.memmove(target, source, nbytes)

    def destroy(self, stream: Any) -> None:
        self.streams -= 1


@pytest.mark.parametrize(("io", "cast"), [("direct", False), ("cached", True)])
def test_pools_on_a_device_of_its_own_memory(
    folder: Path, tmp_path: Path, io: str, cast: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(on_demand, "on_cuda", lambda: True)
    monkeypatch.setattr(on_demand, "DeviceMemory", lambda: DeviceMemory(driver))
    if cast:
        folder = zoo.save_checkpoint("qwen3_5_moe", tmp_path / "model", dtype=mx.bfloat16)
    want = expected(folder, SHORT)
    model = held(folder, 2, io=io, dtype="float32")
    assert np.array_equal(logits(model, SHORT), want)
    plan, streaming = model.outcore.plan, model.outcore.streaming
    assert driver.kept > 0.8 * plan.pool_bytes
    before = driver.copies
    streaming.drain()
    streaming.experts.resize([3] * len(streaming.experts.slots))
    assert driver.copies > before
    assert np.array_equal(logits(model, SHORT), want)
    driver.broken = True
    with pytest.raises(outcore.OutcoreError, match="CUDA error 700"):
        for token in IDS:
            mx.eval(model(mx.array([[token]]), cache=make_prompt_cache(model)))
    driver.broken = False
    assert np.array_equal(logits(model, SHORT), want)
    model.outcore.close()
    assert driver.streams == 0


def test_a_longer_text_takes_its_memory_from_the_pools(folder: Path) -> None:
    theirs, tokenizer = mlx_lm.load(str(folder))
    with pytest.raises(outcore.BudgetError) as refused:
        outcore.load(str(folder), memory=1, experts=4, context=64, prompt=16)
    budget = refused.value.smallest or 0
    model, ours = outcore.load(str(folder), memory=budget, context=64, prompt=16, draft="none", govern=False)
    session: Session = model.outcore
    assert session.plan.pools
    before = session.plan.pool_bytes
    prompt = tokenizer.encode("x = 1\n" * 20)
    want = [r.token for r in mlx_lm.stream_generate(theirs, tokenizer, prompt, max_tokens=3)]
    assert [r.token for r in outcore.stream_generate(model, ours, prompt, max_tokens=3)] == want
    assert session.plan.pool_bytes < before and session.plan.peak_bytes <= budget
    model.outcore.close()


def test_a_read_that_fails_names_the_expert_and_changes_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, end = 5, 13
    want = expected(folder, (prompt, *[1] * (end - prompt)))
    model = held(folder, 3)
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array(IDS[:prompt])[None], cache=cache))
    whole, fails = FileReader.submit, itertools.cycle([False] * 6 + [True])

    def submit(self: FileReader, name: str, *args: Any) -> Any:
        read = whole(self, name, *args)
        if "expert" in name and next(fails):
            read.wait_quietly()
            read.error = ReadError(f"the disk fails at {name}")
        return read

    monkeypatch.setattr(FileReader, "submit", submit)
    found, failures = [], 0
    for token in IDS[prompt:end]:
        for _ in range(40):
            try:
                out = model(mx.array([[token]]), cache=cache)
                break
            except ReadError as e:
                failures += 1
                assert "expert" in str(e)
        found.append(np.array(out)[0])
    assert failures > 3
    assert np.array_equal(np.concatenate(found), want[prompt:])
    model.outcore.close()


@pytest.mark.parametrize(("experts", "broken"), [(5, True), (EXPERTS, False)])
def test_what_fails_in_one_thread_is_no_others_trouble(
    folder: Path, experts: int, broken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor what a thread that has ended left unevaluated: arrays belong to their thread's stream."""
    model = held(folder, experts)
    left: list[Any] = []

    def fails() -> None:
        cache = make_prompt_cache(model)
        for n in range(3):  # tokens one by one, which go to the pools
            left.append(model(mx.array(IDS[n : n + 1])[None], cache=cache))
        if broken:
            with monkeypatch.context() as patch, pytest.raises(ReadError):
                patch.setattr(ExpertReads, "bring", lambda *_: (_ for _ in ()).throw(ReadError("broken")))
                for n in range(3, 20):
                    left.append(model(mx.array(IDS[n : n + 1])[None], cache=cache))

    thread = threading.Thread(target=fails)
    thread.start()
    thread.join()
    assert len(left) >= 1 and np.array_equal(logits(model, PASSES), expected(folder))
    model.outcore.close()


def test_pools_come_back_from_any_size(folder: Path) -> None:
    """A part at a time, as the governor gives and takes; also where a part is less than a slot a layer."""
    slots = 5
    model = held(folder, slots)
    residency = model.outcore.residency
    whole = model.outcore.plan.pools
    want = expected(folder, SHORT)
    for nbytes in (1, residency.layers.movable()[0] // 3, 10**12):
        while residency.layers.movable()[0]:
            assert residency.layers.give(nbytes)[0]
            assert all(1 <= n <= slots for _, n in model.outcore.plan.pools)
        assert {n for _, n in model.outcore.plan.pools} == {1}
        assert np.array_equal(logits(model, SHORT), want)
        while back := residency.layers.movable()[1]:
            assert residency.layers.take(max(nbytes, back[0]))[0]
        assert model.outcore.plan.pools == whole
    assert np.array_equal(logits(model, SHORT), want)
    model.outcore.close()


def test_a_pass_takes_time(folder: Path) -> None:
    model = held(folder, 5)
    logits(model, [3, 1])
    assert 0 < model.outcore.streaming.pass_s < 30
    model.outcore.close()


def test_a_file_that_is_short_names_layer_and_expert(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in folder.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    model = held(copy, 3, io="cached")
    with (copy / "model.safetensors").open("r+b") as f:
        f.truncate(200_000)
    with pytest.raises(outcore.OutcoreError, match=r"model\.safetensors"):
        for token in IDS:
            mx.eval(model(mx.array([[token]]), cache=make_prompt_cache(model)))
    model.outcore.close()


def test_a_closed_model_keeps_no_pools(folder: Path) -> None:
    model = held(folder, 12)
    logits(model, [3, 1])
    before, pools = mx.get_active_memory(), model.outcore.plan.pool_bytes
    gc.disable()
    try:
        model.outcore.close()
        assert mx.get_active_memory() <= before - pools
    finally:
        gc.enable()
    assert not any("Pooled" in type(m).__name__ for m in model.modules())


def test_everything_that_fits_is_resident_and_nothing_waits(folder: Path) -> None:
    model = outcore.load_model(folder, memory="1GB", context=128, govern=False)[0]
    assert not model.outcore.plan.streams and not model.outcore.plan.pools
    model.outcore.close()


def test_requests_that_cannot_be_met_are_refused(folder: Path, quick_models: Callable[[int], Path]) -> None:
    with pytest.raises(UsageError, match="experts 4: this model has no experts"):
        outcore.load_model(quick_models(2), memory="1GB", experts=4)
    with pytest.raises(UsageError, match="one or the other"):
        outcore.load_model(folder, memory="1GB", experts=4, resident=1)
    with pytest.raises(UsageError, match="experts"):
        outcore.load_model(folder, memory="1GB", experts=-1)
    with pytest.raises(outcore.BudgetError) as refused:
        outcore.load_model(folder, memory="4MB", experts=8, context=64)
    assert refused.value.smallest is not None
    model = outcore.load_model(folder, memory=refused.value.smallest, experts=8, context=64, govern=False)[0]
    model.outcore.close()


# The policy


@functools.cache
def calls(seed: int, tokens: int, experts: int = 32, used: int = 4) -> list[npt.NDArray[np.int64]]:
    """What tokens use where some experts are common, others come and go with the subject, and some with the word."""
    rng = np.random.default_rng(seed)
    common, found = rng.dirichlet(np.full(experts, 0.3)), []
    for t in range(tokens):
        if t % 150 == 0:
            subject = rng.dirichlet(np.full(experts, 0.15))
        shares = 0.3 * common + 0.5 * subject + 0.2 / experts
        found.append(rng.choice(experts, used, replace=False, p=shares / shares.sum()))
    return found


def lru(trace: list[npt.NDArray[np.int64]], slots: int) -> int:
    """Misses."""
    inside: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for call in trace:
        for e in call.tolist():
            misses += e not in inside
            inside[e] = None
            inside.move_to_end(e)
            if len(inside) > slots:
                inside.popitem(last=False)
    return misses


@pytest.mark.parametrize("slots", [3, 8, 16])
def test_frequencies_miss_less_than_recency(slots: int) -> None:
    ours = theirs = 0
    for seed in range(2):
        trace, policy = calls(seed, 600), ExpertPolicy(32, slots)
        theirs += lru(trace, slots)
        for call in trace:
            policy.used(call[None])
            for group in policy.groups(set(call.tolist())):
                ours += len(group.loads)
                policy.placed(group.loads)
    assert ours < 0.92 * theirs


@pytest.mark.parametrize("slots", [1, 2, 5, 9, 32])
def test_groups_hold_each_expert_once_in_slots_of_their_own(slots: int) -> None:
    rng, policy = np.random.default_rng(slots), ExpertPolicy(32, slots)
    for _ in range(300):
        call = rng.choice(32, rng.integers(1, 12), replace=False)
        policy.used(call[None])
        seen: list[int] = []
        for group in policy.groups(set(call.tolist())):
            policy.placed(group.loads)
            places = [int(policy.slot_of[e]) for e in group.experts]
            assert min(places) >= 0 and len(set(places)) == len(places)
            assert {policy.expert_in[s] for s in places} == set(group.experts)
            seen += group.experts
        assert sorted(seen) == sorted(call.tolist())
        inside = policy.expert_in[policy.expert_in >= 0]
        assert all(policy.expert_in[policy.slot_of[e]] == e for e in inside)
        assert (policy.slot_of >= 0).sum() == len(inside)


def test_counting_many_tokens_at_once_is_counting_them_one_by_one() -> None:
    trace = np.stack(calls(0, 40))
    together, apart = ExpertPolicy(32, 8), ExpertPolicy(32, 8)
    together.used(trace)
    for call in trace:
        apart.used(call[None])
    assert np.allclose(together.scores, apart.scores)


def test_long_passes_go_over_all_experts() -> None:
    shapes = [(128, 8, 40)] * 3
    assert reads_experts(1, shapes) and reads_experts(16, shapes)
    assert not reads_experts(64, shapes), "nearly all of them are used"
    assert not reads_experts(8, [(128, 8, 8)]), "in many groups"
    assert not reads_experts(2048, shapes)
    assert reads_experts(1, [(128, 8, 2)]), "one token is computed in groups, whatever it takes"
    assert [hit_rate(s) for s in (0.0, 1.0)] == [0.0, 1.0]
    assert all(hit_rate(a / 50) <= hit_rate((a + 1) / 50) for a in range(50))


def test_on_metal_all_experts_pass_by_where_a_pool_would_take_another_kernel(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Metal's choice is by numbers for each expert in the array that it is given."""
    assert on_demand.same_kernel(63, 256, 8) and on_demand.same_kernel(64, 16, 15)
    assert not on_demand.same_kernel(64, 32, 16) and on_demand.same_kernel(64, 32, 17)
    model = held(folder, 12)
    experts = model.outcore.streaming.experts
    assert experts.begin(2)
    monkeypatch.setattr(on_demand, "reads_experts", lambda *_: True)
    monkeypatch.setattr(on_demand, "on_metal", lambda: True)
    assert experts.begin(2) and experts.begin(15) and experts.begin(16)
    monkeypatch.setattr(on_demand, "same_kernel", lambda numbers, *_: numbers < 60)
    assert not experts.begin(15) and experts.begin(14)
    experts.abandon()
    model.outcore.close()


@pytest.mark.parametrize("model_type", ["nemotron_h", "qwen3_5_moe"])
def test_copies_out_of_a_pool_are_waited_for_before_it_changes(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there are fewer units than slots, the next sweep's are read while this one's are computed."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    passes = (20, 1, 20, 1, 20)
    monkeypatch.setattr(expert_windows, "LEAST", 1)

    def slow(target: memoryview, source: memoryview) -> None:
        time.sleep(0.005)
        move(target, source)

    model = held(folder, 2, io="cached")
    model.outcore.streaming.ring.reader.move = slow
    assert np.array_equal(logits(model, passes), expected(folder, passes))
    model.outcore.close()
