"""What clients of OpenAI's, Anthropic's and Ollama's APIs get from ``outcore serve``: the shapes of
answers, streams and errors, recorded in golden/wire.json. One server of a tiny model in a process of its own."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import json_shapes as shapes
import pytest

SAY = [{"role": "user", "content": "def add(a, b):"}]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
CHAT = {"messages": SAY, "max_tokens": 6, "temperature": 0}
FEW = {"num_predict": 6, "temperature": 0}

ASKED: dict[str, tuple[str, str, dict[str, Any] | None]] = {
    "health": ("GET", "/health", None),
    "models": ("GET", "/v1/models", None),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "chat.two_with_logprobs": ("POST", "/v1/chat/completions", CHAT | {"n": 2, "logprobs": True, "top_logprobs": 2}),
    "chat.stop": ("POST", "/v1/chat/completions", CHAT | {"stop": ["e", "a", " ", "\n"], "max_tokens": 20}),
    "chat.stream": ("POST", "/v1/chat/completions", CHAT | {"stream": True}),
    "chat.stream_with_usage": (
        "POST",
        "/v1/chat/completions",
        CHAT | {"stream": True, "stream_options": {"include_usage": True}},
    ),
    "chat.no_messages": ("POST", "/v1/chat/completions", {"max_tokens": 6}),
    "chat.wrong_number": ("POST", "/v1/chat/completions", CHAT | {"temperature": -1}),
    "chat.no_model": ("POST", "/v1/chat/completions", CHAT | {"model": "nobody/nothing"}),
    "completions": ("POST", "/v1/completions", {"prompt": "x = ", "max_tokens": 6, "temperature": 0, "logprobs": 1}),
    "completions.stream": (
        "POST",
        "/v1/completions",
        {"prompt": "x = ", "max_tokens": 6, "temperature": 0, "stream": True},
    ),
    "responses": ("POST", "/v1/responses", {"input": "x = ", "max_output_tokens": 16, "temperature": 0}),
    "responses.stream": (
        "POST",
        "/v1/responses",
        {"input": "x = ", "max_output_tokens": 16, "temperature": 0, "stream": True},
    ),
    "responses.wrong": ("POST", "/v1/responses", {"input": 7}),
    "messages": ("POST", "/v1/messages", {"messages": SAY, "max_tokens": 6, "temperature": 0}),
    "messages.stream": ("POST", "/v1/messages", {"messages": SAY, "max_tokens": 6, "temperature": 0, "stream": True}),
    "messages.wrong": ("POST", "/v1/messages", {"messages": SAY}),
    "messages.count": ("POST", "/v1/messages/count_tokens", {"messages": SAY}),
    "ollama.chat": ("POST", "/api/chat", {"messages": SAY, "stream": False, "options": FEW}),
    "ollama.chat.stream": ("POST", "/api/chat", {"messages": SAY, "options": FEW}),
    "ollama.generate": ("POST", "/api/generate", {"prompt": "x = ", "stream": False, "options": FEW}),
    "ollama.generate.stream": ("POST", "/api/generate", {"prompt": "x = ", "options": FEW}),
    "ollama.wrong": ("POST", "/api/chat", {"messages": 7}),
    "ollama.tags": ("GET", "/api/tags", None),
    "ollama.ps": ("GET", "/api/ps", None),
    "ollama.version": ("GET", "/api/version", None),
    "nowhere": ("GET", "/v1/nowhere", None),
    "nowhere.ollama": ("POST", "/api/nowhere", {}),
}


@pytest.fixture(scope="module")
def address(
    quick_models: Callable[[int], Path], demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    folder = Path(shutil.copytree(quick_models(2), tmp_path_factory.mktemp("served") / "model"))
    shutil.copy(demo_model / "chat_template.jinja", folder)
    own = {
        "OUTCORE_CACHE": str(tmp_path_factory.mktemp("serve")),
        "OUTCORE_CONFIG": os.devnull,
        "OUTCORE_MONITOR": "off",
    }
    words = [
        "serve",
        "--model",
        str(folder),
        "--port",
        "0",
        "--memory",
        "1GB",
        "--context",
        "256",
        "--draft",
        "none",
        "--cpu-streams",
        "1",
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "outcore", *words], stdout=subprocess.PIPE, text=True, env=os.environ | own
    )
    assert process.stdout is not None
    found = re.search(r"http://\S+", process.stdout.readline())
    assert found is not None
    yield found[0].rstrip("/,.;")
    process.terminate()
    assert process.wait(60) == 0, "SIGTERM ends it well"
    process.stdout.close()


def events_of(text: str) -> list[Any]:
    """A stream's events: of server-sent ones the name, where there is one, and the data; or a line of JSON each."""
    found: list[Any] = []
    for block in text.split("\n\n") if "data:" in text else text.splitlines():
        fields = [line.partition(":")[::2] for line in block.splitlines() if not line.startswith(":")]
        data = "".join(value.strip() for name, value in fields if name == "data") if "data:" in text else block
        if not data:
            continue
        value = json.loads(data) if data != "[DONE]" else data
        name = next((value.strip() for name, value in fields if name == "event"), None) if "data:" in text else None
        found.append(value if name is None else {"event": {"type": name}, "data": value})
    return found


def test_answers_streams_and_errors_have_the_shapes_that_clients_know(address: str) -> None:
    found: dict[str, Any] = {}
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        for name, (method, path, body) in ASKED.items():
            answer = client.request(method, path, json=body)
            kind = answer.headers["content-type"].partition(";")[0]
            streams = "stream" in name
            value = shapes.collapsed(events_of(answer.text)) if streams else shapes.shape(answer.json())
            found[name] = {"status": answer.status_code, "content_type": kind, "is": value}
        show = client.post("/api/show", json={"model": client.get("/api/tags").json()["models"][0]["name"]}).json()
        # What a model's configuration says is the model's own.
        found["ollama.show"] = sorted(show)
        listed = client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()
        found["messages.models"] = shapes.shape(listed)
        one = client.get(f"/v1/models/{client.get('/v1/models').json()['data'][0]['id']}")
        found["model"] = {"status": one.status_code, "is": shapes.shape(one.json())}
        told = re.findall(r"^# TYPE (\S+) (\S+)$", client.get("/metrics").text, re.MULTILINE)
        found["metrics"] = dict(sorted(told))
        odd = client.post("/v1/chat/completions", json=CHAT | {"oddity": 1})
        found["ignored"] = odd.headers["x-outcore-ignored"]
    shapes.same("wire", found)


def test_a_stream_says_what_the_whole_answer_says(address: str) -> None:
    """Greedy, of one prompt: the texts of all APIs are one, and of each its stream's parts together."""
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        whole = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]["content"]
        parts = events_of(client.post("/v1/chat/completions", json=CHAT | {"stream": True}).text)
        assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts[:-1]) == whole
        asked = {"messages": SAY, "options": FEW}
        assert client.post("/api/chat", json=asked | {"stream": False}).json()["message"]["content"] == whole
        parts = events_of(client.post("/api/chat", json=asked).text)
        assert "".join(p["message"]["content"] for p in parts) == whole
        asked = {"messages": SAY, "max_tokens": 6, "temperature": 0}
        assert client.post("/v1/messages", json=asked).json()["content"][0]["text"] == whole
        asked = {"input": SAY, "max_output_tokens": 6, "temperature": 0}
        said = client.post("/v1/responses", json=asked).json()["output"][0]["content"][0]["text"]
        assert said == whole


def test_no_part_of_a_stop_string_is_in_an_answer(address: str) -> None:
    """Also where several begin alike, and the text comes in pieces that end in the middle of them."""
    with httpx.Client(base_url=address, trust_env=False, timeout=60) as client:
        body = CHAT | {"max_tokens": 16}
        whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]["content"]
        assert len(whole) > 12
        for at in range(1, len(whole) - 6, len(whole) // 3):
            stops = [whole[at : at + 6], whole[at + 1 : at + 3] + "\x00", whole[at : at + 2] + "\x00"]
            expected = whole[: whole.index(stops[0])]
            answer = client.post("/v1/chat/completions", json=body | {"stop": stops}).json()["choices"][0]
            assert (answer["message"]["content"], answer["finish_reason"]) == (expected, "stop")
            parts = events_of(client.post("/v1/chat/completions", json=body | {"stop": stops, "stream": True}).text)
            assert "".join(p["choices"][0]["delta"].get("content") or "" for p in parts[:-1]) == expected
