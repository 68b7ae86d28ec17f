"""mlx-lm's own server, patched: the same answers, within the budget, and one client's error stays that client's."""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import mlx_lm.server
import pytest
from mlx_lm.generate import BatchGenerator, StopSequences
from mlx_lm.models.cache import LRUPromptCache, RotatingKVCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler

import outcore
import zoo
from outcore import PromptError, UsageError
from outcore_compat.batch_generator import SharedBatchGenerator
from outcore_compat.mlx_lm import apply_patch
from outcore_compat.stored_caches import BoundedPromptCache, cache_room

PROMPTS = [f"def f{i}(x):\n    return" * (1 + i % 3) for i in range(6)]


def ask(port: int, path: str, **body: Any) -> tuple[int, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=90)
    connection.request("POST", f"/v1/{path}", json.dumps({"model": "default_model"} | body))
    response = connection.getresponse()
    data = response.read()
    connection.close()
    return response.status, json.loads(data)


@contextmanager
def server(folder: Path, **options: Any) -> Iterator[tuple[int, Any]]:
    """mlx_lm.server as its ``main`` runs it, in this process: its port and what generates."""
    defaults = {
        "model": str(folder), "adapter_path": None, "draft_model": None, "num_draft_tokens": 3, "chat_template": "",
        "trust_remote_code": False, "use_default_chat_template": False, "temp": 0.0, "top_p": 1.0, "top_k": 0,
        "min_p": 0.0, "max_tokens": 512, "chat_template_args": {}, "decode_concurrency": 32, "prompt_concurrency": 8,
        "prefill_step_size": 2048, "prompt_cache_size": 10, "prompt_cache_bytes": None, "kv_bits": None,
        "kv_group_size": 64, "quantized_kv_start": 5000, "pipeline": False, "allowed_origins": ["*"],
    }  # fmt: skip
    provider = mlx_lm.server.ModelProvider(argparse.Namespace(**(defaults | options)))
    generator = mlx_lm.server.ResponseGenerator(provider, mlx_lm.server.LRUPromptCache(10))

    def handler(*args: Any, **kwargs: Any) -> Any:
        made: Any = mlx_lm.server.APIHandler(generator, *args, **kwargs)
        return made

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=httpd.serve_forever)
    thread.start()
    try:
        yield httpd.server_port, generator
    finally:
        httpd.shutdown()
        thread.join()
        httpd.server_close()
        generator.stop_and_join()


def together(port: int, prompts: list[str], tokens: int) -> list[tuple[str, str]]:
    """Texts and finish reasons of requests that are there at once."""
    found: list[Any] = [None] * len(prompts)

    def one(i: int) -> None:
        status, body = ask(port, "completions", prompt=prompts[i], max_tokens=tokens)
        assert status == 200, body
        found[i] = (body["choices"][0]["text"], body["choices"][0]["finish_reason"])

    threads = [threading.Thread(target=one, args=(i,)) for i in range(len(prompts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return found


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mlx_lm.server.APIHandler, "log_message", lambda *_: None)


def test_clients_that_come_at_once_get_mlx_lms_answers_within_the_budget(
    quick_models: Callable[[int], Path],
) -> None:
    folder = quick_models(6)
    with server(folder) as (port, _):
        expected = together(port, PROMPTS, 12)
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    budget = 11_000_000
    with apply_patch(memory=budget, context=64), server(folder) as (port, generator):
        assert ask(port, "completions", prompt="x", max_tokens=1)[0] == 200
        session = generator.model_provider.model.outcore
        assert session.plan.streamed
        session.metrics.reset()
        mx.reset_peak_memory()
        assert together(port, PROMPTS, 12) == expected
        assert session.metrics.sweeps < 6 * 13, "sweeps are shared"
        assert mx.get_peak_memory() - others <= budget
        assert len(generator.prompt_cache) >= 1, "the last ones are stored, where nobody needs the room"
        sweeps = session.metrics.sweeps
        assert together(port, PROMPTS[:1], 12) == expected[:1]
        assert session.metrics.sweeps - sweeps <= 13, "one for the prompt, and at most one a token"
        # One that there is no room for is refused, and the others never hear of it.
        status, body = ask(port, "completions", prompt="x = 1\n" * 9000, max_tokens=4)
        assert status == 404 and "are not enough" in body["error"]
        assert together(port, PROMPTS[:2], 12) == expected[:2]
        assert generator.is_healthy


def test_chats_seeds_logprobs_and_stop_words_are_mlx_lms(short_model: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 6}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", chat),
        ("chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
        ("completions", {"prompt": PROMPTS[0], "max_tokens": 6, "seed": 3, "temperature": 0.8}),
        ("completions", {"prompt": PROMPTS[1], "max_tokens": 12, "stop": "\n"}),
        ("completions", {"prompt": PROMPTS[1], "max_tokens": 6, "repetition_penalty": 1.2}),
    ]

    def answers(port: int) -> list[Any]:
        found = []
        for path, body in asked:
            status, answer = ask(port, path, **body)
            assert status == 200, answer
            found.append([{k: v for k, v in c.items() if k != "index"} for c in answer["choices"]])
        return found

    with server(short_model) as (port, _):
        expected = answers(port)
    with apply_patch(resident=1, context=128), server(short_model) as (port, generator):
        assert answers(port) == expected
        assert generator.model_provider.model.outcore.metrics.sweeps > 0


def test_a_draft_model_and_a_prompt_cache_work_as_in_mlx_lm(quick_models: Callable[[int], Path]) -> None:
    folder = quick_models(4)
    with server(folder) as (port, _):
        expected = together(port, PROMPTS[:1], 8)
    with apply_patch(memory="40MB", context=64), server(folder, draft_model=str(folder)) as (port, generator):
        assert not generator.model_provider.is_batchable or generator.model_provider.draft_model is not None
        assert together(port, PROMPTS[:1], 8) == expected
        assert together(port, PROMPTS[:1], 8) == expected
        assert len(generator.prompt_cache) >= 1


def test_a_server_that_is_imported_later_is_guarded_too(
    quick_models: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokenize(generator: Any, tokenizer: Any, request: Any, args: Any) -> Any:
        return [5] * request, None

    late: Any = types.ModuleType("mlx_lm.server")
    late.ResponseGenerator = type("ResponseGenerator", (), {"_tokenize": tokenize})
    with apply_patch(resident=1, context=64):
        monkeypatch.setitem(sys.modules, "mlx_lm.server", late)
        model, _ = mlx_lm.load(str(quick_models(4)))
        generator = types.SimpleNamespace(model_provider=types.SimpleNamespace(model=model))
        guarded = late.ResponseGenerator._tokenize
        with model.outcore as session:
            assert guarded is not tokenize and len(guarded(generator, None, 70, None)[0]) == 70
            session.plan = replace(session.plan, budget_bytes=session.plan.smallest_budget_bytes)
            with pytest.raises(PromptError, match="the prompt has 4000 tokens, for which"):
                guarded(generator, None, 4000, None)
    assert late.ResponseGenerator._tokenize is tokenize


# The batch generator by itself


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("zoo") / "model")


IDS = [[3, 4, 5, 6], [20, 21], [30, 31, 32, 33, 34, 35, 36]]


def write(generator: Any, uids: list[int]) -> dict[int, tuple[list[int], str, Any]]:
    """Tokens, finish reasons and what the caches hold in the end."""
    found: dict[int, tuple[list[int], str, Any]] = {}
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    for _ in range(200):
        for r in generator.next_generated():
            tokens[r.uid].append(r.token)
            assert abs(mx.exp(r.logprobs).sum().item() - 1) < 1e-3
            if r.finish_reason is not None:
                held = r.all_tokens
                assert r.prompt_cache[0].offset == len(held)
                found[r.uid] = (tokens[r.uid], r.finish_reason, held)
        if len(found) == len(uids):
            return found
    raise AssertionError(found)


@pytest.fixture
def pair(small: Path) -> Iterator[tuple[nn.Module, nn.Module]]:
    plain, _ = mlx_lm.utils.load_model(small)
    model, _ = outcore.load_model(small, resident=1, context=32, draft="none", cpu_streams=1, govern=False)
    with model.outcore:
        yield plain, model


def test_it_takes_and_gives_what_mlx_lms_does(pair: tuple[nn.Module, nn.Module]) -> None:
    results = []
    for kind, model in zip((BatchGenerator, SharedBatchGenerator), pair, strict=True):
        generator = kind(model, max_tokens=5, stop_tokens=[[9999]])
        first = generator.insert(IDS[:2])
        stop = StopSequences([results[0][0][2][0][2:4]]) if results else None
        later = generator.insert_segments(
            [[IDS[2][:3], IDS[2][3:]]], [6], samplers=[make_sampler(temp=0.0)], logits_processors=[[]],
            stop_sequences=[stop] if stop else None,
        )  # fmt: skip
        with generator.stats() as stats:
            results.append((write(generator, first + later), stats))
        generator.close()
    (theirs, _), (ours, stats) = results
    assert [ours[uid][:2] for uid in (0, 1)] == [theirs[uid][:2] for uid in (0, 1)]
    tokens, reason, held = ours[2]
    assert (tokens, reason) == (theirs[2][0][:4], "stop"), "the stop sequence's last token ends it"
    assert held == (IDS[2] + tokens)[:-1], "all but the last"
    assert stats.generation_tokens == 14 and stats.prompt_tokens == 13 and stats.generation_steps == 5


def test_a_text_goes_on_from_a_cache(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, model = pair
    theirs, ours = BatchGenerator(plain, max_tokens=8), SharedBatchGenerator(model, max_tokens=4)
    expected, _, _ = write(theirs, theirs.insert([IDS[0]]))[0]
    uid = ours.insert([IDS[0]])[0]
    first: Any = None
    while first is None:
        first = next((r for r in ours.next_generated() if r.finish_reason), None)
    rest = (IDS[0] + expected)[len(first.all_tokens) :][:1]
    before = first.prompt_cache[0].offset
    (second,) = ours.insert([rest], [4], caches=[first.prompt_cache], all_tokens=[first.all_tokens])
    (token,) = ours.next()[1]
    assert model.outcore.streaming.sweep_tokens == 1, "what the cache holds is not computed again"
    assert [token.token, *write(ours, [second])[second][0]] == expected[4:8]
    assert first.prompt_cache[0].offset == before
    with pytest.raises(UsageError, match="all_tokens"):
        ours.insert([rest], caches=[first.prompt_cache])
    with pytest.raises(UsageError, match="max_kv_size"):
        ours.insert([rest], caches=[[RotatingKVCache(8) for _ in first.prompt_cache]])
    with pytest.raises(UsageError, match="max_kv_size"):
        SharedBatchGenerator(model, max_kv_size=8)
    with pytest.raises(PromptError, match="empty"):
        ours.insert([[]])
    with pytest.raises(PromptError, match="not enough"):
        session = model.outcore
        session.plan = replace(session.plan, budget_bytes=session.plan.smallest_budget_bytes)
        ours.insert([[5] * 30_000])
    assert uid == 0
    theirs.close()
    ours.close()


def test_sequences_are_removed_with_their_caches(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, model = pair
    theirs, ours = BatchGenerator(plain, max_tokens=8), SharedBatchGenerator(model, max_tokens=8)
    expected = write(theirs, theirs.insert(IDS))
    uids = ours.insert(IDS)
    tokens: dict[int, list[int]] = {uid: [] for uid in uids}
    for step in range(20):
        for r in ours.next()[1]:
            tokens[r.uid].append(r.token)
        if step == 1:
            assert ours.extract_cache([]) == {}
            with pytest.raises(UsageError, match="under way are not handed out"):
                ours.extract_cache(uids)
        if step == 3:
            assert ours.remove([uids[2]], return_prompt_caches=True)[2][1] == (IDS[2] + tokens[2])[:-1]
    assert {uid: t for uid, t in tokens.items() if uid < 2} == {uid: expected[uid][0] for uid in (0, 1)}
    assert tokens[2] == expected[2][0][:4] and ours.next() == ([], [])
    theirs.close()
    ours.close()


def test_a_texts_states_take_no_memory_of_those_beside_it(tmp_path: Path) -> None:
    model, _ = outcore.load_model(zoo.save_checkpoint("mamba2", tmp_path / "model"), resident=1, context=32)
    with model.outcore:
        generator = SharedBatchGenerator(model, max_tokens=30)
        uids = generator.insert([[5 + i, 6] for i in range(8)])
        for _ in range(3):
            generator.next()
        gc.collect()
        before = mx.get_active_memory()
        caches = generator.remove(uids[:1], return_prompt_caches=True)[uids[0]][0]
        generator.remove(uids[1:])
        gc.collect()
        assert mx.get_active_memory() - before <= -6 * sum(c.nbytes for c in caches)
        generator.close()


def test_a_sampler_that_raises_ends_its_own_sequence(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, model = pair
    theirs, ours = BatchGenerator(plain, max_tokens=5), SharedBatchGenerator(model, max_tokens=5)
    expected = write(theirs, theirs.insert(IDS[:1]))[0]

    def bad(_: mx.array) -> mx.array:
        raise RuntimeError("mine")

    good, _ = ours.insert(IDS[:2], samplers=[None, bad])
    with pytest.raises(RuntimeError, match="mine"):
        while True:
            ours.next()
    found = write(ours, [good])
    assert found[good][0] == expected[0]
    theirs.close()
    ours.close()


def test_an_answer_that_outgrows_memory_ends_with_length(small: Path) -> None:
    smallest = outcore.plan_model(str(small), context=32, prompt=8).smallest_budget_bytes
    model, _ = outcore.load_model(small, memory=smallest, context=32, prompt=8, draft="none", govern=False)
    with model.outcore as session:
        generator = SharedBatchGenerator(model, max_tokens=4000)
        generator.insert([IDS[0]])
        tokens, reason = [], None
        while reason is None:
            (r,) = generator.next_generated()
            tokens.append(r.token)
            reason = r.finish_reason
        assert reason == "length" and len(tokens) == 32 - len(IDS[0])
        assert session.plan.peak_bytes <= session.plan.budget_bytes and len(r.all_tokens) == r.prompt_cache[0].offset
        generator.close()


def test_without_outcore_it_is_mlx_lms(pair: tuple[nn.Module, nn.Module]) -> None:
    plain, _ = pair
    results = []
    for kind in (BatchGenerator, SharedBatchGenerator):
        generator = kind(plain, max_tokens=4)
        uids = generator.insert(IDS)
        generator.next()
        assert generator.prompt_cache_nbytes > 0
        generator.remove([uids[1]], return_prompt_caches=True)
        with generator.stats() as stats:
            results.append(write(generator, [uids[0], uids[2]]))
        assert stats.generation_tokens == 8
        generator.close()
    assert results[0] == results[1]


# Caches that are stored


def test_stored_caches_keep_to_what_nobody_else_takes(small: Path) -> None:
    smallest = outcore.plan_model(str(small), context=256).smallest_budget_bytes
    model, _ = outcore.load_model(
        small, memory=smallest + 300_000, context=256, draft="none", govern=False, cpu_streams=1
    )
    gc.collect()  # other tests' models
    cache_room.join(model)
    with model.outcore as session:
        store = BoundedPromptCache(10)

        def stored(n: int) -> int:
            cache = make_prompt_cache(model)
            model(mx.array([[5 + n] * 100]), cache=cache)
            store.insert_cache("model", [5 + n] * 100, cache)
            return sum(c.nbytes for c in cache)

        each = stored(0)
        room = session.plan.cache_bytes
        for n in range(1, 10):
            stored(n)
        assert 0 < len(store) < 10 and store.nbytes <= room < store.nbytes + 2 * each
        kept = len(store)
        with cache_room.texts(session, 1, 200):
            assert len(store) < kept and store.nbytes + 0 <= room
        with cache_room.texts(session, 8, 256):
            assert len(store) == 0
        assert stored(0) and store.fetch_nearest_cache("model", [5] * 101)[1] == [5]
    plain = LRUPromptCache(10)
    assert isinstance(store, LRUPromptCache) and len(plain) == 0


def test_what_was_stored_is_let_go_by_a_loop_that_looked_at_it(pair: tuple[nn.Module, nn.Module]) -> None:
    _, model = pair
    generator, store = SharedBatchGenerator(model, max_tokens=2), BoundedPromptCache(10)
    uids = generator.insert(IDS[:2], [2, 4])
    ended: list[Any] = []
    while len(ended) < 2:
        for r in generator.next_generated():
            if r.finish_reason is not None:
                ended.append(r)
                if r.uid == uids[0]:
                    store.insert_cache("model", r.all_tokens, r.prompt_cache)
    assert ended[0].prompt_cache == [], "it is the store's"
    generator.next()
    assert ended[1].prompt_cache, "it is whose it was given to"
    generator.close()


def test_a_long_prompt_is_told_of_part_by_part_and_no_part_is_an_end(small: Path) -> None:
    prompt = [3 + i * 7 % 50 for i in range(600)]
    plain, _ = mlx_lm.utils.load_model(small)
    theirs = BatchGenerator(plain, max_tokens=4)
    expected = write(theirs, theirs.insert([prompt]))[0][:2]
    options: dict[str, Any] = {"context": 32, "draft": "none", "cpu_streams": 1, "govern": False}
    model, _ = outcore.load_model(small, memory="1GB", prefill_step_size=64, **options)
    with model.outcore:
        ours = SharedBatchGenerator(model, max_tokens=4)
        (uid,) = ours.insert([prompt])
        told, tokens = ours.next()
        assert not tokens and [(r.uid, r.end_of_prompt) for r in told] == [(uid, False)]
        assert 0 < told[0].progress[0] < told[0].progress[1] == 600
        assert write(ours, [uid])[uid][:2] == expected
        ours.close()
