"""What a plan says is taken at most is not passed by long prompts, and planning takes the same for any context."""

from __future__ import annotations

import ast
import gc
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

import outcore
import zoo
from outcore.decode.preparation import prepare
from outcore.modules.layers import find_layers
from outcore.plan.cache_size import ALL
from outcore.plan.model_size import Graph, ModelSize
from outcore.plan.planner import resident_budget, smallest_budget
from stand_ins import TokensOnly

WIDE = {
    "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 8,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 262_144,
}  # fmt: skip
"""Caches weigh more than all else after a long prompt: 4 kB for each token and layer."""


def saved(model_type: str, folder: Path, **more: Any) -> Path:
    config = zoo.CONFIGS[model_type]
    wide = config | more | ({"text_config": config["text_config"] | WIDE} if "text_config" in config else WIDE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, model_type, wide)
        return zoo.save_checkpoint(model_type, folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("peaks")
    windows = {"sliding_window": 256, "query_pre_attn_scalar": 64}
    return {
        "dense": saved("qwen3", root / "dense"),
        "windows": saved("gemma3_text", root / "windows", **windows),
        "hybrid": saved("qwen3_5", root / "hybrid"),
        "shared": zoo.save_checkpoint("gemma4_text", root / "shared"),
        "latents": zoo.save_checkpoint("mistral4", root / "latents"),
        "vocabulary": zoo.save_checkpoint("phi3small", root / "vocabulary"),
        "masks": zoo.save_checkpoint("deepseek_v3", root / "masks"),
        "rounds": zoo.save_checkpoint("iquestloopcoder", root / "rounds"),
        "rewritten": saved("jamba", root / "rewritten", mamba_d_state=128),
        "pairs": saved("mamba2", root / "pairs", num_heads=64, state_size=2),
        "own caches": zoo.save_checkpoint("deepseek_v41", root / "own"),
    }


@pytest.mark.parametrize(
    ("kind", "prompt", "kv", "resident"),
    [
        ("dense", 360, {}, 0),  # the last chunk length that fits by less than what MLX keeps of it
        ("windows", 300, {}, 0),
        ("hybrid", 100, {}, 0),
        ("hybrid", 100, {}, None),
        ("shared", 200, {}, 0),
        ("masks", 240, {}, 0),
        ("latents", 200, {}, 0),  # in parts, between which each pass keeps the keys and values that it expands
        ("vocabulary", 200, {}, 0),
        ("rounds", 240, {}, 4),
        ("own caches", 280, {}, 0),
        ("rewritten", 100, {}, 0),  # states, copied for each token: what MLX may queue beyond its limit
        ("pairs", 100, {"prefill_step_size": 128}, 0),  # decays from each token to each, which weigh more than states
        ("dense", 300, {"kv_bits": 8, "kv_group_size": 64, "quantized_kv_start": 250}, 0),
    ],
    ids=[
        "dense",
        "windows",
        "hybrid",
        "hybrid resident",
        "shared",
        "masks",
        "latents",
        "vocabulary",
        "layers that are not called",
        "caches of its own",
        "rewritten states",
        "pairs of tokens",
        "quantized late",
    ],
)
def test_no_long_prompt_passes_the_plan(
    folders: dict[str, Path], kind: str, prompt: int, kv: dict[str, int], resident: int | None
) -> None:
    options: dict[str, Any] = {"context": prompt + 4, "prompt": prompt, "resident": resident, "cpu_streams": 1}
    options["prefill_step_size"] = kv.get("prefill_step_size")
    least = prepare(folders[kind], memory=1, least=True, **options).planning.smallest
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    memory = "2GB" if resident is None else least + least // 50
    model, _ = outcore.load_model(folders[kind], memory=memory, govern=False, draft="none", **options)
    ids = [3 + (7919 * i) % 100 for i in range(prompt)]
    with model.outcore as session:
        assert (session.streaming is None) == (resident is None)
        assert session.plan.split or kind != "latents"
        tokens = [r.token for r in outcore.stream_generate(model, TokensOnly(), ids, max_tokens=4, **kv)]
        # Where nothing is streamed MLX may keep what the budget leaves over, after the text too.
        peak = mx.get_peak_memory() - before + (0 if session.streaming is None else mx.get_cache_memory())
        assert len(tokens) == 4
        assert peak <= session.plan.peak_bytes <= session.plan.budget_bytes


def test_a_prompt_that_outgrows_the_plan_leaves_less_for_freed_memory(folders: dict[str, Path]) -> None:
    """All in memory: what the budget leaves over, MLX may keep; a longer prompt's caches take it instead."""
    prompt = 400
    whole = prepare(folders["dense"], memory="2GB", context=prompt + 4, prompt=prompt).profile.size
    gc.collect()
    mx.clear_cache()
    others, held = mx.get_active_memory(), list[int]()

    def frees(*_: int) -> None:
        for n in range(100):
            mx.eval(mx.zeros((200_000 + 9_000 * n,), mx.uint8) + 1)  # of a size that is not kept yet
        held.append(mx.get_active_memory() + mx.get_cache_memory() - others)

    memory = resident_budget(whole) + 500_000
    model, _ = outcore.load_model(folders["dense"], memory=memory, context=64, govern=False, draft="none")
    with model.outcore as session:
        first = session.plan.context
        ids = [3 + (7919 * i) % 100 for i in range(prompt)]
        list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=4, prompt_progress_callback=frees))
        assert session.streaming is None and first < prompt < session.plan.context
        assert max(held) <= memory


def test_a_budget_is_planned_and_a_plan_is_used_where_a_context_is_filled(tmp_path: Path) -> None:
    """Weights weigh more than all else, as they do in models that are worth streaming."""
    heavy = {"hidden_size": 512, "num_hidden_layers": 3, "intermediate_size": 1024, "num_key_value_heads": 2}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(zoo.CONFIGS, "qwen3", zoo.CONFIGS["qwen3"] | WIDE | heavy)
        folder = zoo.save_checkpoint("qwen3", tmp_path / "model")
    options: dict[str, Any] = {"context": 80, "prompt": 72, "cpu_streams": 1}
    least = prepare(folder, memory=1, least=True, **options).planning.smallest
    everything = prepare(folder, memory="1GB", **options).plan.weight_bytes
    # What is counted for a growing cache, and between parts of a layer, is not all there at once: more in small plans.
    for memory, used in ((least + least // 50, 0.6), (everything + 2_000_000, 0.84)):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        model, _ = outcore.load_model(folder, memory=memory, govern=False, draft="none", **options)
        with model.outcore as session:
            assert session.streaming is not None and session.plan.peak_bytes >= 0.9 * memory
            ids = [3 + (7919 * i) % 100 for i in range(72)]
            assert len(list(outcore.stream_generate(model, TokensOnly(), ids, max_tokens=4))) == 4
            peak, kept = mx.get_peak_memory() - before, mx.get_cache_memory()
            assert used * session.plan.peak_bytes <= peak <= peak + kept <= session.plan.peak_bytes <= memory


def test_a_long_prompt_is_built_in_parts_and_its_tokens_stay_the_same(folders: dict[str, Path]) -> None:
    """A graph of all of it would be the process's own memory; several sweeps take the same chunks."""
    ids, found, sweeps = [3 + (7919 * i) % 500 for i in range(76)], [], []
    for most in (10**12, 6_000_000, 1):
        model, _ = outcore.load_model(
            folders["hybrid"], memory="1GB", resident=0, context=80, prefill_step_size=8, cpu_streams=1, draft="none"
        )
        with model.outcore as session, pytest.MonkeyPatch.context() as patch:
            assert session.streaming is not None and session.size.graph(True).recurrent == 2
            patch.setattr(ModelSize, "graph", lambda *_, most=most: Graph(4, 2, most))
            found.append([r.token for r in outcore.stream_generate(model, TokensOnly(), ids, max_tokens=3)])
            sweeps.append(session.metrics.sweeps)
    assert found[0] == found[1] == found[2]
    # The prompt is nine chunks of 8, three tokens, and one more; two sweeps are for the other two tokens.
    assert sweeps[0] == 3 and 3 < sweeps[1] < sweeps[2] == 13


def test_what_passes_hold_for_later_layers_counts_the_text_before_a_prompt(tmp_path: Path) -> None:
    """The next prompts of a conversation: each pass holds the whole text's keys and values."""
    with pytest.MonkeyPatch.context() as patch:
        fat = zoo.CONFIGS["gemma4_text"] | {"intermediate_size": 256, "max_position_embeddings": 8192}
        patch.setitem(zoo.CONFIGS, "gemma4_text", fat)
        folder = zoo.save_checkpoint("gemma4_text", tmp_path / "model")
    options: dict[str, Any] = {"context": 400, "prompt": 120, "resident": 0, "cpu_streams": 1}
    size = replace(prepare(folder, memory=1, least=True, **options).profile.size, reading=ALL)
    least = smallest_budget(size, resident=0)  # with all of a prompt in one reading
    gc.collect()
    mx.clear_cache()
    before = mx.get_active_memory()
    model, _ = outcore.load_model(folder, memory=least + least // 50, govern=False, draft="none", **options)
    with model.outcore as session:
        cache, text, held, sweeps = make_prompt_cache(model), list[int](), 0, [0]
        for turn in range(3):
            mx.reset_peak_memory()
            prompt = [*text[held:], *(3 + (7919 * (i + turn)) % 100 for i in range(119))]
            more = {"prompt_cache": cache, "history": text[:held], "leave_last": True}
            answer = [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=2, **more)]
            text, held = [*text[:held], *prompt, *answer], held + session.in_cache
            peak = mx.get_peak_memory() + mx.get_cache_memory() - before
            assert peak <= session.plan.peak_bytes <= session.plan.budget_bytes, turn
            sweeps.append(session.metrics.sweeps - sum(sweeps))
        assert sweeps[1] < sweeps[2] < sweeps[3], "fewer passes share a sweep, the longer the text is"


@pytest.mark.parametrize(
    ("model_type", "resident"), [("gemma4_text", None), ("gemma3n", 2), ("longcat_flash_ngram", 0)]
)
def test_products_before_the_layers_are_no_heads(model_type: str, resident: int | None, tmp_path: Path) -> None:
    """A sweep whose logits nobody wants computes what is multiplied before the layers, in its turn."""
    folder = zoo.save_checkpoint(model_type, tmp_path / "model")
    ids, whole = [3 + (7919 * i) % 100 for i in range(18)], mlx_lm.utils.load_model(folder)[0]
    steps = generate_step(mx.array(ids), whole, max_tokens=2, prefill_step_size=8)
    expected = [(int(token), logprobs) for token, logprobs in steps]
    options: dict[str, Any] = {"memory": "1GB", "head_resident": False, "context": 32, "cpu_streams": 1}
    resident = len(find_layers(whole)) if resident is None else resident
    model, _ = outcore.load_model(folder, resident=resident, draft="none", govern=False, **options)
    with model.outcore as session, pytest.MonkeyPatch.context() as patch:
        assert session.streaming is not None and session.plan.head_streamed
        assert len(session.plan.resident) == resident
        plain = session.size.graph(True)
        for most in (10**12, 1):
            graph = replace(plain, most=most, held=10**12)
            patch.setattr(ModelSize, "graph", lambda *_, graph=graph: graph)
            found = outcore.stream_generate(model, TokensOnly(), ids, max_tokens=2, prefill_step_size=8)
            for r, (token, logprobs) in zip(found, expected, strict=True):
                assert r.token == token and mx.array_equal(r.logprobs, logprobs).item()


def test_passes_share_a_reading_as_far_as_their_graphs_are_small() -> None:
    graph = Graph(layers=10, most=10 * 1_280_000)
    assert graph.readings([16] * 10) == [10]
    assert graph.readings([16] * 25 + [1]) == [10, 10, 6]
    assert Graph(10, most=1).readings([64, 64, 1]) == [1, 1, 1]
    by_token = Graph(1, 10, most=140_000 * 100 + 2 * 128_000)
    assert by_token.readings([50, 50, 50, 49]) == [2, 2]
    assert by_token.readings([2000, 1]) == [1, 1]
    assert graph.readings([]) == []
    assert Graph(0).readings([16, 16, 1]) == [3]  # the first of several ranks, which has none of the layers


def test_passes_share_a_reading_as_far_as_what_they_hold_for_later_layers_is_small() -> None:
    graph = Graph(1, versions=10, held=10 * (256 + 300))
    assert graph.readings([100] * 4, 400) == [1, 1, 1, 1]  # two are more than that already
    assert replace(graph, held=10 * (3 * 256 + 100 + 200 + 300)).readings([100] * 4, 400) == [3, 1]
    assert replace(graph, held=10 * (3 * 256 + 100 + 200 + 300)).readings([100] * 4, 4000) == [1, 1, 1, 1]
    assert Graph(1, masked=1, held=16 * (16 + 32)).readings([16] * 4, 64) == [2, 1, 1]
    assert Graph(1).readings([100] * 4, 4000) == [4]


# What a process takes


def most_resident(*commands: list[str]) -> list[tuple[int, int]]:
    """Exit status of each of the commands, one after the other in a process, and its most resident bytes by then."""
    code = (
        "import json, sys\nfrom outcore.cli.main import main\nfrom outcore.machine.memory import peak_rss\n"
        "print([(main(argv), peak_rss()) for argv in json.loads(sys.argv[1])])"
    )
    argv = [sys.executable, "-c", code, json.dumps(commands)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    found: list[tuple[int, int]] = ast.literal_eval(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def taken(demo_model: Path, folders: dict[str, Path]) -> list[tuple[int, int]]:
    """Of a plan for a short and for a long context, and of a short and of a long prompt that are refused."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folders["hybrid"] / name).write_bytes((demo_model / name).read_bytes())
    plan = ["plan", "--no-calibrate", str(folders["hybrid"]), "--context"]
    generate = ["generate", "--model", str(folders["hybrid"]), "--memory", "1MB", "--prompt"]
    return most_resident([*plan, "1024"], [*plan, "131072"], [*generate, "word "], [*generate, "word " * 15_000])


def test_planning_takes_the_same_memory_for_any_context(taken: list[tuple[int, int]]) -> None:
    (status, short), (again, long) = taken[:2]
    assert (status, again) == (0, 0)
    assert long - short <= short // 20


def test_a_prompt_that_is_refused_takes_no_memory_for_its_length(taken: list[tuple[int, int]]) -> None:
    (status, short), (again, long) = taken[2:]
    assert (status, again) == (1, 1)
    # Tokenizing takes some for each word.
    assert long <= short + 30_000_000


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_second_message_into_sliding_windows_fits_into_the_least_memory(kind: str, tmp_path: Path) -> None:
    """A pass of several tokens is undone by a copy of the windows."""
    folder, prompt = zoo.save_checkpoint(kind, tmp_path / "m"), [5 + i * 7 % 90 for i in range(40)]
    options = {"context": 128, "prompt": 40, "govern": False, "draft": "none", "resumable": True}
    least = prepare(folder, memory=1, least=True, **options).planning.smallest
    plain, _ = mlx_lm.utils.load_model(folder)
    theirs = make_prompt_cache(plain)
    gc.collect()
    before = mx.get_active_memory()
    model, _ = outcore.load_model(folder, memory=least, **options)
    with model.outcore as session:
        cache = make_prompt_cache(model)
        for text in (prompt, prompt[:20]):
            mx.reset_peak_memory()
            answer = outcore.stream_generate(model, TokensOnly(), text, max_tokens=3, prompt_cache=cache)
            found = [r.token for r in answer]
            assert mx.get_peak_memory() + mx.get_cache_memory() - before <= session.plan.peak_bytes <= least
            step = {"prompt_cache": theirs, "prefill_step_size": session.plan.prefill_step}
            wanted = mlx_lm.stream_generate(plain, TokensOnly(), mx.array(text), max_tokens=3, **step)
            assert found == [r.token for r in wanted]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
@pytest.mark.parametrize("planned", [16, 200])
def test_a_prompt_is_read_in_parts_where_there_is_no_room_for_all_of_it(
    kind: str, planned: int, tmp_path: Path
) -> None:
    folder, prompt = zoo.save_checkpoint(kind, tmp_path / "m"), [5 + i * 7 % 90 for i in range(150)]
    options = {"context": 256, "prompt": planned, "govern": False, "draft": "none", "resumable": True}
    prepared = prepare(folder, memory=1, least=True, **options)
    least = prepared.planning.smallest
    assert least < smallest_budget(replace(prepared.profile.size, prompt=150, reading=ALL))
    gc.collect()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    model, _ = outcore.load_model(folder, memory=least, **options)
    with model.outcore as session:
        chunk, cache = session.plan.prefill_step, make_prompt_cache(model)
        answer = [r.token for r in outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=3)]
        assert mx.get_peak_memory() + mx.get_cache_memory() - before <= session.plan.peak_bytes <= least
        readings = -(-150 // 16)
        assert session.metrics.sweeps == readings + 2
        assert replace(session.size, prompt=150).further_readings(chunk) == readings - 1
        # Passes of 9 tokens, two of which pass the 16 that share a planned reading.
        list(outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=1, prefill_step_size=9))
        assert session.metrics.sweeps == readings + 2 + 149 // 9
        # In the middle of the second part.
        seen, begun = [0], session.metrics.sweeps

        def stop() -> None:
            seen[0] += session.metrics.sweeps == begun + 2
            if seen[0] == 2:
                raise KeyboardInterrupt

        assert session.streaming is not None
        session.streaming.after_unit.append(stop)
        with pytest.raises(KeyboardInterrupt):
            list(outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=3, prompt_cache=cache))
        session.streaming.after_unit.remove(stop)
        again = outcore.stream_generate(model, TokensOnly(), prompt, max_tokens=3, prompt_cache=cache)
        assert [r.token for r in again] == answer
    plain, _ = mlx_lm.utils.load_model(folder)
    wanted = mlx_lm.stream_generate(plain, TokensOnly(), mx.array(prompt), max_tokens=3, prefill_step_size=chunk)
    assert [r.token for r in wanted] == answer
