"""What the engine promises to whoever uses ``outcore``: mlx-lm's bits, a budget that holds, and no wrong token after
whatever went wrong. On public names alone; each of these finds a fault of ``dev/faults``."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tuner.utils import linear_to_lora_layers

import outcore
import zoo

LONG = [3 + (7 * i * i + 5 * i) % 55 for i in range(60)]
PROMPT = LONG[:12]

TYPES = ["llama", "gemma3_text", "qwen3_5", "mamba2", "qwen3_5_moe"]
"""Full attention and sliding windows, recurrent states beside attention and alone, routed experts."""

WAYS: dict[str, dict[str, Any]] = {
    "resident": {},
    "half": {"resident": 1},
    "streamed": {"resident": 0, "slots": 2, "head_resident": False},
    "smallest": {},
    "drafted": {"resident": 0, "draft": "ngram"},
}


STEPS = {"resident": [5, 2048], "half": [5], "streamed": [5, 2048], "smallest": [5], "drafted": [2048]}


class Broken(Exception):
    """What a user's function raises."""


# ---- bits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_every_way_of_holding_a_model_gives_mlx_lms_bits(model_type: str, models: Any, load: Any) -> None:
    """The prompt in one chunk, and in several that share a forward pass over the weights."""
    folder = models.folder(model_type)
    expected = {step: models.theirs(folder, PROMPT, 4, prefill_step_size=step) for step in (5, 2048)}
    for name, options in WAYS.items():
        if name == "smallest":
            options = {"context": 32, "prompt": 12, "prefill_step_size": 5}
            options["memory"] = models.smallest(folder, **options)
        model = load(folder, **options)
        assert model.outcore.plan.streams == (name != "resident")
        for step in STEPS[name]:
            assert models.ours(model, PROMPT, 4, prefill_step_size=step) == expected[step], (name, step)
        assert model.outcore.plan.peak_bytes <= model.outcore.plan.budget_bytes


def test_what_a_layer_leaves_in_its_caches_is_computed_in_its_turn(models: Any, load: Any) -> None:
    """A type whose caches hold what is made from weights and is not on the path of the layer's output."""
    folder = models.folder("deepseek_v41")
    theirs, found = mlx_lm.utils.load_model(folder)[0], []
    for model in (theirs, load(folder, resident=0, slots=2)):
        cache = make_prompt_cache(model)
        said = []
        for ids in ([5, 6, 7, 8, 9], [1, 2, 3], [4], [11], [12], [13], [14]):
            said.append(model(mx.array([ids]), cache=cache))
            mx.eval(said, [c.state for c in cache])
        found.append([np.array(each).tobytes() for each in said])
    assert found[0] == found[1]


def test_a_slot_is_not_read_into_while_its_layer_is_computed(
    models: Any, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers that take much longer to compute than to read: on the CPU, 4-bit weights with bfloat16 activations."""
    wide = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 6}
    monkeypatch.setitem(zoo.CONFIGS, "llama", zoo.CONFIGS["llama"] | wide)
    folder = zoo.save_checkpoint("llama", tmp_path, dtype=mx.bfloat16, quantize={"bits": 4, "group_size": 32})
    model = load(folder, resident=0, slots=2, context=256, prompt=160)
    assert models.ours(model, PROMPT, 2) == models.theirs(folder, PROMPT, 2)


def test_experts_give_mlx_lms_bits_with_any_number_of_them_in_memory(models: Any, load: Any) -> None:
    folder = models.folder("qwen3_5_moe")
    expected = models.theirs(folder, PROMPT, 6)
    for experts in (0, 1, 3):
        model = load(folder, experts=experts)
        assert models.ours(model, PROMPT, 6) == expected, experts


def test_experts_that_are_given_up_in_the_middle_of_a_text_change_no_bit(models: Any, load: Any) -> None:
    """The text outgrows what was planned for it, so that fewer experts have a place in memory from then on."""
    folder, room = models.with_experts(), {"context": 16, "prompt": 8}
    expected = models.theirs(folder, PROMPT[:8], 12)
    for experts in (6, 12):
        budget = models.smallest(folder, experts=experts, **room) + 50_000
        model = load(folder, memory=budget, **room)
        before = model.outcore.plan
        assert models.ours(model, PROMPT[:8], 12) == expected, experts
        assert model.outcore.plan.pool_bytes < before.pool_bytes and model.outcore.plan.peak_bytes <= budget


@pytest.mark.parametrize("start", [0, 20])
def test_keys_and_values_are_quantized_where_mlx_lm_does_it(start: int, models: Any, load: Any) -> None:
    """Also where memory is short and prompts are computed in shorter chunks than mlx-lm's."""
    folder = models.folder("qwen3")
    prompt = LONG
    how = {"kv_bits": 4, "kv_group_size": 32, "quantized_kv_start": start}
    expected = models.theirs(folder, prompt, 5, **how)
    assert expected != models.theirs(folder, prompt, 5)
    room = {"context": 128, "prompt": 60}
    for memory in ("1GB", models.smallest(folder, **room)):
        model = load(folder, memory=memory, **room)
        assert model.outcore.plan.prefill_step < len(prompt) or memory == "1GB"
        assert models.ours(model, prompt, 5, **how) == expected, memory


def test_a_bounded_window_sees_what_mlx_lms_sees(models: Any, load: Any) -> None:
    """With a budget that has a prompt computed in short chunks where nothing is bounded."""
    folder = models.folder("qwen3")
    prompt = LONG
    expected = models.theirs(folder, prompt, 5, max_kv_size=16)
    room = {"context": 128, "prompt": 60}
    tight = models.smallest(folder, **room)
    model = load(folder, memory=tight, **room)
    short = model.outcore.plan.prefill_step
    assert short < len(prompt)
    assert models.theirs(folder, prompt, 5, max_kv_size=16, prefill_step_size=short) != expected
    answered = []
    for memory in (tight, 2 * tight, "1GB"):
        # A chunk that there is no room for is refused, and not made shorter.
        with contextlib.suppress(outcore.BudgetError):
            assert models.ours(load(folder, memory=memory, **room), prompt, 5, max_kv_size=16) == expected, memory
            answered.append(memory)
    assert "1GB" in answered


def test_sequences_that_come_and_go_have_the_tokens_that_they_have_alone(quick_models: Any) -> None:
    model, tokenizer = outcore.load(str(quick_models(4)), resident=2, sequences=4, context=32, draft="none")
    prompts, most = [LONG[n : n + 4 + 3 * n] for n in range(4)], [3, 7, 4, 9]
    with model.outcore:
        alone = [
            [r.token for r in outcore.stream_generate(model, tokenizer, p, max_tokens=n)]
            for p, n in zip(prompts, most, strict=True)
        ]
        found = outcore.batch_generate(model, tokenizer, prompts, max_tokens=most, return_token_ids=True)
    assert found.token_ids == alone
    assert [len(a) for a in alone] == most


# ---- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.4, 0.8])
def test_what_mlx_holds_never_passes_the_budget(share: float, models: Any, load: Any) -> None:
    """Of a model whose layers are much larger than what its tokens take."""
    folder = models.folder("qwen3", hidden_size=512, intermediate_size=1024, num_hidden_layers=5)
    budget = int(share * (folder / "model.safetensors").stat().st_size)
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    mx.reset_peak_memory()
    model = load(folder, memory=budget, context=16, prompt=4)
    assert model.outcore.plan.streams and model.outcore.plan.peak_bytes <= budget
    assert len(models.ours(model, PROMPT[:4], 5)) == 5
    assert mx.get_peak_memory() + mx.get_cache_memory() - others <= budget


def test_a_text_that_outgrows_its_plan_keeps_its_bits_and_reads_each_layer_once_a_token(models: Any, load: Any) -> None:
    """Layers that were resident are given up for it in the middle of the answer."""
    folder = models.folder("qwen3", num_hidden_layers=8, hidden_size=256, intermediate_size=512)
    whole = _tokens(models.theirs(folder, PROMPT[:8], 28))  # before there is a budget, which it would wait for
    model = load(folder, memory=int(2.2 * models.smallest(folder, context=300, prompt=8)), context=16, prompt=8)
    session = model.outcore
    before, found, read = set(session.plan.resident), [], []
    for r in outcore.stream_generate(model, models.no_text, PROMPT[:8], max_tokens=28):
        found.append(r.token)
        read.append(session.metrics.bytes_read)
    assert found == whole
    assert set(session.plan.resident) < before
    # Direct reads are of whole blocks, and one or two units may be under way.
    expected = 16 * session.plan.bytes_per_token
    assert expected * 0.97 < read[-1] - read[11] < expected * 1.04


# ---- what goes wrong ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("way", "model_type", "bound"),
    [
        ("resident", "llama", None), ("resident", "qwen3_5", None), ("streamed", "llama", None),
        ("streamed", "qwen3", 8), ("streamed", "qwen3_5", None), ("streamed", "mamba2", None),
    ],
)  # fmt: skip
def test_what_a_callers_function_raises_leaves_the_cache_as_it_was(
    way: str, model_type: str, bound: int | None, models: Any, load: Any
) -> None:
    """A sampler that raises with the prompt's token, or a later one; the text goes on as if nothing had been."""
    folder = models.folder(model_type)
    whole = _tokens(models.theirs(folder, PROMPT, 5, **_cache_of(folder, bound)))
    model = load(folder, **WAYS[way])
    for fails_at in (1, 2, 4):
        asked = [0]

        def sampler(logprobs: mx.array, asked: list[int] = asked, fails_at: int = fails_at) -> mx.array:
            asked[0] += 1
            if asked[0] == fails_at:
                raise Broken
            return mx.argmax(logprobs, axis=-1)

        cache, said = make_prompt_cache(model, bound), []
        with pytest.raises(Broken):
            for r in outcore.stream_generate(
                model, models.no_text, PROMPT, max_tokens=5, prompt_cache=cache, sampler=sampler
            ):
                said.append(r.token)
        assert said == whole[: fails_at - 1]
        assert _gone_on(model, said, whole, cache, models) == whole, fails_at


@pytest.mark.parametrize("model_type", ["llama", "qwen3_5"])
@pytest.mark.parametrize("way", ["resident", "streamed"])
def test_a_token_that_a_signal_kept_from_being_seen_is_not_in_the_cache(
    way: str, model_type: str, models: Any, load: Any
) -> None:
    folder = models.folder(model_type)
    whole = _tokens(models.theirs(folder, PROMPT, 5))
    model = load(folder, **WAYS[way])

    def interrupted(*_: Any) -> None:
        raise Broken

    handler = signal.signal(signal.SIGALRM, interrupted)
    try:
        for comes_at in (1, 2, 4):
            asked = [0]

            def sampler(logprobs: mx.array, asked: list[int] = asked, comes_at: int = comes_at) -> mx.array:
                asked[0] += 1
                if asked[0] == comes_at:
                    signal.raise_signal(signal.SIGALRM)
                return mx.argmax(logprobs, axis=-1)

            cache, said = make_prompt_cache(model), []
            with pytest.raises(Broken):
                for r in outcore.stream_generate(
                    model, models.no_text, PROMPT, max_tokens=5, prompt_cache=cache, sampler=sampler
                ):
                    said.append(r.token)
            assert _gone_on(model, said, whole, cache, models) == whole, comes_at
    finally:
        signal.signal(signal.SIGALRM, handler)


@pytest.mark.parametrize("how", ["fails", "ends early"])
@pytest.mark.parametrize("io", ["cached", "direct"])
def test_a_read_that_fails_is_an_error_that_names_the_file_and_the_next_answer_is_right(
    io: str, how: str, models: Any, load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk fails in the middle of an answer, and works again."""
    folder = models.folder("qwen3")
    expected = models.theirs(folder, PROMPT, 5)
    whole = _tokens(expected)
    model = load(folder, resident=0, slots=2, io=io)
    preadv, broken = os.preadv, [False]

    def read(fd: int, buffers: Any, *args: Any) -> int:
        # Layers alone: a row of the embeddings is read before them, and would be what is missed.
        if not broken[0] or sum(map(len, buffers)) < 4096:
            return preadv(fd, buffers, *args)
        time.sleep(0.01)  # so that the read is waited for
        if how == "fails":
            raise OSError(5, "Input/output error")
        return 0

    monkeypatch.setattr(os, "preadv", read)
    for fails_after in (1, 3):
        cache, said = make_prompt_cache(model), []
        with pytest.raises(outcore.ReadError, match=r"model\.safetensors"):
            for r in outcore.stream_generate(model, models.no_text, PROMPT, max_tokens=5, prompt_cache=cache):
                said.append((r.token, np.array(r.logprobs).tobytes()))
                broken[0] = len(said) == fails_after
        broken[0] = False
        assert said == expected[: len(said)]
        assert _gone_on(model, _tokens(said), whole, cache, models) == whole


@pytest.mark.parametrize("io", ["cached", "direct"])
def test_a_file_that_became_shorter_is_an_error_that_names_it_and_never_a_token(
    io: str, models: Any, load: Any, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(models.folder("qwen3"), tmp_path / "model"))
    expected = models.theirs(folder, PROMPT, 6)
    whole = (folder / "model.safetensors").read_bytes()
    model = load(folder, resident=0, slots=2, io=io)
    said: list[int] = []
    with pytest.raises(outcore.ReadError, match=r"model\.safetensors"):
        for r in outcore.stream_generate(model, models.no_text, PROMPT, max_tokens=6):
            said.append(r.token)
            if len(said) == 2:
                os.truncate(folder / "model.safetensors", 8192)
    # The token that was under way may have been read already.
    assert said == _tokens(expected)[: len(said)] and len(said) in (2, 3)
    with pytest.raises(outcore.ReadError, match=r"model\.safetensors"):
        models.ours(model, PROMPT, 6)
    model.outcore.close()
    with pytest.raises(outcore.OutcoreError, match=r"model\.safetensors"):
        load(folder, resident=0)
    (folder / "model.safetensors").write_bytes(whole)
    assert models.ours(load(folder, resident=0, io=io), PROMPT, 6) == expected


def test_a_model_that_was_written_to_while_it_ran_says_so(models: Any, load: Any, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(models.folder("qwen3"), tmp_path / "model"))
    model = load(folder, resident=0)
    assert len(models.ours(model, PROMPT, 2)) == 2
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    with pytest.raises(outcore.ReadError, match=r"model\.safetensors"):
        models.ours(model, PROMPT, 2)


def test_a_closed_model_says_so_and_gives_its_memory_back(models: Any, load: Any) -> None:
    model = load(models.folder("qwen3"), resident=0)
    assert len(models.ours(model, PROMPT, 2)) == 2
    model.outcore.close()
    model.outcore.close()
    with pytest.raises(outcore.ClosedError):
        models.ours(model, PROMPT, 2)


# ---- prompts on disk, and the caller's random numbers -------------------------------------------------------------


def _prefixed(models: Any, load: Any, folder: Path, prompt: list[int], **options: Any) -> tuple[Any, int]:
    """An answer of a model that keeps prompts, and the tokens that it computed of them."""
    model = load(folder, context=2048, prompt=1200, prefix_cache="on", **options)
    answer = models.ours(model, prompt, 3)
    found = model.outcore.metrics.prompt_found
    model.outcore.close()
    return answer, found


def test_a_prompt_finds_no_block_of_one_that_began_otherwise(models: Any, load: Any) -> None:
    folder, rng = models.folder("qwen3", num_hidden_layers=1), random.Random(1)
    first, other, middle = ([rng.randrange(3, 60) for _ in range(512)] for _ in range(3))
    expected = models.theirs(folder, [*other, *middle, 7], 3, prefill_step_size=512)
    assert _prefixed(models, load, folder, [*first, *middle, 7])[1] == 0
    assert _prefixed(models, load, folder, [*other, 7])[1] == 0
    found = _prefixed(models, load, folder, [*other, *middle, 7])
    assert found == (expected, 512)


def test_a_prompt_of_an_adapter_is_found_with_that_adapter_alone(models: Any, load: Any, tmp_path: Path) -> None:
    folder, rng = models.folder("qwen3", num_hidden_layers=1), random.Random(2)
    prompt = [rng.randrange(3, 60) for _ in range(520)]
    adapters = [_adapter(folder, tmp_path / f"adapter{n}", n) for n in range(2)]
    plain, first, second = (
        _prefixed(models, load, folder, prompt, adapter_path=None if a is None else str(a)) for a in (None, *adapters)
    )
    assert plain[1] == first[1] == second[1] == 0 and len({str(a) for a, _ in (plain, first, second)}) == 3
    for a, (answer, _) in zip((None, *adapters), (plain, first, second), strict=True):
        again = _prefixed(models, load, folder, prompt, adapter_path=None if a is None else str(a))
        assert again == (answer, 520)


def test_loading_and_greedy_text_leave_the_callers_random_numbers(models: Any, load: Any) -> None:
    folder = models.folder("qwen3")

    def state() -> tuple[Any, ...]:
        return mx.random.state[0].tolist(), np.random.get_state()[1].tolist(), random.getstate()  # type: ignore[index]

    before = state()
    for options in ({}, {"resident": 0}, {"resident": 0, "draft": "self:4"}):
        models.ours(load(folder, **options), PROMPT, 3)
        assert state() == before, options


def _adapter(model: Path, folder: Path, seed: int) -> Path:
    """A LoRA adapter of random weights."""
    loaded = mlx_lm.utils.load_model(model)[0]
    parameters = {"rank": 4, "scale": 8.0, "dropout": 0.0, "keys": ["self_attn.v_proj"]}
    linear_to_lora_layers(loaded, 1, parameters)
    folder.mkdir()
    shapes = {k: v.shape for k, v in tree_flatten(loaded.parameters()) if ".lora_" in k}
    drawn = np.random.default_rng(seed)
    weights = {k: mx.array(drawn.normal(size=s).astype(np.float32)) for k, s in shapes.items()}
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    config = {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def _gone_on(model: Any, said: list[int], whole: list[int], cache: list[Any], models: Any) -> list[int]:
    """All of a text that broke off, after the tokens that its cache does not hold were computed. Where it holds all
    that was said, the next token is given to it."""
    held = model.outcore.in_cache
    assert held <= len(PROMPT) + len(said) and (held >= len(PROMPT) + len(said) - 1 if said else held == 0)
    if held == len(PROMPT) + len(said):
        said = whole[: len(said) + 1]
    rest = [*PROMPT, *said][held:]
    return said + _tokens(models.ours(model, rest, len(whole) - len(said), prompt_cache=cache))


def _tokens(answer: Any) -> list[int]:
    return [token for token, _ in answer]


def _cache_of(folder: Path, bound: int | None) -> dict[str, Any]:
    """A cache for mlx-lm's own loop that is bounded as ours is."""
    return {} if bound is None else {"prompt_cache": make_prompt_cache(mlx_lm.utils.load_model(folder)[0], bound)}
