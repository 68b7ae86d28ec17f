"""mlx-lm's own server, patched: the same answers, within the budget, and one client's error stays that client's."""

from __future__ import annotations

import argparse
import gc
import http.client
import json
import shutil
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
import mlx_lm
import mlx_lm.server
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache

import outcore
import zoo
from outcore import PromptError
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
    folder = quick_models(4)
    with server(folder) as (port, _):
        expected = together(port, PROMPTS, 4)
    gc.collect()
    mx.clear_cache()
    others = mx.get_active_memory()
    planned = outcore.plan_model(str(folder), context=64)
    budget = (planned.smallest_budget_bytes + planned.peak_bytes) // 2
    with apply_patch(memory=budget, context=64), server(folder) as (port, generator):
        assert ask(port, "completions", prompt="x", max_tokens=1)[0] == 200
        session = generator.model_provider.model.outcore
        assert session.plan.streams
        session.metrics.reset()
        mx.reset_peak_memory()
        assert together(port, PROMPTS, 4) == expected
        assert mx.get_peak_memory() - others <= budget
        assert len(generator.prompt_cache) >= 1, "the last ones are stored, where nobody needs the room"
        sweeps = session.metrics.sweeps
        assert together(port, PROMPTS[:1], 4) == expected[:1]
        assert session.metrics.sweeps - sweeps <= 5, "one for the prompt, and at most one a token"
        # One that there is no room for is refused, and the others never hear of it.
        status, body = ask(port, "completions", prompt="x = 1\n" * 9000, max_tokens=4)
        assert status == 404 and "too many for" in body["error"]
        assert together(port, PROMPTS[:2], 4) == expected[:2]
        assert generator.is_healthy


def test_chats_seeds_logprobs_and_stop_words_are_mlx_lms(
    quick_models: Callable[[int], Path], demo_model: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(quick_models(4), tmp_path / "chats"))
    shutil.copy(demo_model / "chat_template.jinja", folder)
    chat = {"messages": [{"role": "user", "content": "def f(x):"}], "max_tokens": 4}
    asked: list[tuple[str, dict[str, Any]]] = [
        ("chat/completions", chat),
        ("chat/completions", chat | {"logprobs": True, "top_logprobs": 2}),
        ("completions", {"prompt": PROMPTS[0], "max_tokens": 4, "seed": 3, "temperature": 0.8}),
        ("completions", {"prompt": PROMPTS[1], "max_tokens": 4, "repetition_penalty": 1.2}),
        # A word that comes at once: token 90 is an x.
        ("completions", {"prompt": PROMPTS[1], "max_tokens": 4, "stop": "x", "logit_bias": {"90": 100}}),
    ]

    def answers(port: int) -> list[Any]:
        found = []
        for path, body in asked:
            status, answer = ask(port, path, **body)
            assert status == 200, answer
            found.append([{k: v for k, v in c.items() if k != "index"} for c in answer["choices"]])
        assert [c["finish_reason"] for c in found[-1]] == ["stop"]
        return found

    with server(folder) as (port, _):
        expected = answers(port)
    with apply_patch(resident=1, context=128), server(folder) as (port, generator):
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
    own = {"_tokenize": tokenize, "_is_batchable": lambda *_: True}
    late.ResponseGenerator = type("ResponseGenerator", (), own)
    with apply_patch(resident=1, context=64):
        monkeypatch.setitem(sys.modules, "mlx_lm.server", late)
        model, _ = mlx_lm.load(str(quick_models(4)))
        generator = types.SimpleNamespace(model_provider=types.SimpleNamespace(model=model))
        guarded = late.ResponseGenerator._tokenize
        with model.outcore as session:
            assert guarded is not tokenize and len(guarded(generator, None, 70, None)[0]) == 70
            session.plan = replace(session.plan, budget_bytes=session.plan.smallest_budget_bytes)
            with pytest.raises(PromptError, match="the prompt has 4000 tokens, too many for"):
                guarded(generator, None, 4000, None)
            assert not late.ResponseGenerator._is_batchable(generator, None)
    assert all(getattr(late.ResponseGenerator, name) is method for name, method in own.items())


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.save_checkpoint("qwen3", tmp_path_factory.mktemp("zoo") / "model")


# Caches that are stored


def test_stored_caches_keep_to_memory_that_is_not_taken(small: Path) -> None:
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
