"""``outcore serve``: its flags, its line, and how it ends."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from interrupts import heard
from outcore.cli import serve
from outcore.cli.commands import parser_of
from outcore.cli.main import main
from outcore.errors import UsageError
from outcore.serve.server import listen
from quick_transformers import python_path

FAKE = Path(__file__).parent / "support" / "fake_serve.py"


@contextmanager
def served(*flags: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process, and its address."""
    with heard():
        process = subprocess.Popen(
            [sys.executable, FAKE, "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": python_path(*map(Path, sys.path))},
        )
    try:
        told = process.stderr if "--json" in flags else process.stdout
        assert told is not None
        line = told.readline()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()


def told_of(told: str) -> list[str]:
    """The lines about requests to a model."""
    return [line for line in told.splitlines() if "/v1/chat/completions" in line]


def test_sigterm_ends_it_well_when_answers_have_ended() -> None:
    with served("--json") as (process, address):
        answers: list[str] = []

        def read() -> None:
            body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 30, "stream": True}
            with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, trust_env=False) as stream:
                begun.set()
                answers.append("".join(stream.iter_text()))

        begun = threading.Event()
        reader = threading.Thread(target=read)
        reader.start()
        assert begun.wait(30)
        process.send_signal(signal.SIGTERM)
        said, told = process.communicate(timeout=60)
        reader.join()
        assert '"29 "' in answers[0] and answers[0].rstrip().endswith("data: [DONE]")
        assert process.returncode == 0 and "closed, 0 under way" in told
        (line,) = told_of(told)
        assert "127.0.0.1  fake  in 3  cached 0  out 30" in line and "200 POST" in line
        record = json.loads(said)
        assert record["url"] == address and record["requests"] == 1 and record["models"] == ["fake"]


@pytest.mark.parametrize("flags", [("--quiet",), ("--quiet", "--json")])
def test_no_line_tells_of_a_request_where_quiet_is_asked_for(flags: tuple[str, ...]) -> None:
    with served(*flags) as (process, address):
        body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 2}
        assert httpx.post(f"{address}/v1/chat/completions", json=body, trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert not told_of(process.communicate(timeout=60)[1])


def test_ctrl_c_interrupts_and_a_second_one_does_so_at_once() -> None:
    with served("--drain", "3600", "--log-level", "INFO") as (process, address):
        body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 100_000, "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, trust_env=False, timeout=60) as stream:
            texts = stream.iter_text()
            next(texts)
            process.send_signal(signal.SIGINT)
            while httpx.get(f"{address}/health", trust_env=False).status_code == 200:
                pass
            assert process.poll() is None and next(texts)
            process.send_signal(signal.SIGINT)
            assert "shutting down" in "".join(texts)
            _, told = process.communicate(timeout=60)
        assert process.returncode == 130
        assert "Stopping within 3600 s; 1 request still running (Ctrl-C again stops at once)" in told
        assert "outcore serve: interrupted" in told and "closed, 0 under way" in told and "Traceback" not in told
        (line,) = told_of(told)
        assert "127.0.0.1  fake  in 3  cached 0" in line and "failed POST" in line


def test_it_is_gone_within_drain_whatever_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does its model close in time, as in the middle of a long chunk."""
    monkeypatch.setenv("FAKE_CLOSE_S", "60")
    with served("--json", "--drain", "3") as (process, address):
        url = httpx.URL(address)
        connection = http.client.HTTPConnection(url.host, url.port or 80, timeout=60)
        body = {"messages": [{"role": "user", "content": "count"}], "max_tokens": 100_000, "stream": True}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline()
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert b"shutting down" in answer.read() and time.monotonic() - began > 0.5
        said, told = process.communicate(timeout=60)
        assert time.monotonic() - began < 30  # the model takes 60 to close
        assert process.returncode == 0 and "Traceback" not in told
        assert json.loads(said)["models"] == ["fake"]
        connection.close()


WRONG = {
    "no model": ([], "no model: give --model NAME"),
    "no share": (["--model", "m", "--top-p", "2"], "--top-p 2.0: must be from 0 to 1"),
    "no temperature": (["--model", "m", "--temp", "-1"], "--temp -1.0: must be at least 0"),
    "no tokens": (["--model", "m", "--max-tokens", "0"], "--max-tokens 0: give at least 1"),
    "no JSON": (["--model", "m", "--chat-template-config", "{"], "--chat-template-config: not JSON"),
    "no object": (["--model", "m", "--chat-template-config", "[]"], "--chat-template-config: give a JSON object"),
    "ours": (
        ["--model", "m", "--chat-template-config", '{"tools": 1}'],
        "--chat-template-config.tools: Outcore sets this option itself",
    ),
    "no port": (["--model", "m", "--port", "70000"], "--port 70000: must be at most 65535"),
    "everybody": (["--model", "m", "--host", "0.0.0.0", "--port", "0"], "--host 0.0.0.0: other machines could use"),
    "no time": (["--model", "m", "--drain", "nan"], "--drain nan: a number is needed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_meant_is_refused_before_anything_is_loaded(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("loaded")

    monkeypatch.setattr(serve, "open_service", loaded)
    words, wanted = WRONG[name]
    assert main(["serve", *words]) == 2
    assert wanted in capsys.readouterr().err


def test_a_port_that_is_taken_is_reported_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    (taken,) = listen("127.0.0.1", 0)
    taken.listen()
    port = taken.getsockname()[1]
    assert main(["serve", "--model", "m", "--port", str(port)]) == 1
    assert f"--host 127.0.0.1 --port {port}: Address already in use" in capsys.readouterr().err
    taken.close()


def given(*words: str) -> argparse.Namespace:
    """Flags, read."""
    return parser_of("serve").parse_args(list(words))


def test_models_are_named_in_any_way_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert serve.names_of(given("x", "y")) == ["x", "y"]
    assert serve.names_of(given("--model", "x", "--model", "y", "--model", "x")) == ["x", "y"]
    served: list[list[str]] = []
    monkeypatch.setattr(serve, "run", lambda args: served.append(serve.names_of(args)))
    monkeypatch.setenv("OUTCORE_MODEL", "settled")
    assert main(["serve"]) == main(["serve", "x"]) == 0
    assert served == [["settled"], ["x"]]


def test_flags_become_defaults_and_access_rules(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    defaults = serve.defaults_of(given("--temp", "0.5", "--top-k", "3", "--chat-template-config", '{"a": 1}'))
    assert (defaults.sampling.temperature, defaults.sampling.top_k, defaults.max_tokens) == (0.5, 3, 512)
    assert defaults.template_options == {"a": 1}
    assert serve.defaults_of(given("--max-tokens", "-1")).max_tokens is None

    def access(*words: str, host: str = "127.0.0.1") -> serve.Access:
        sockets = listen(host, 0)
        try:
            return serve.access_of(given("--host", host, *words), sockets)
        finally:
            for each in sockets:
                each.close()

    usual = access()
    assert usual.key is None and not usual.addresses and not usual.origins
    assert {"127.0.0.1", socket.gethostname().lower()} <= set(usual.hosts)
    assert access("--insecure", host="0.0.0.0").addresses
    assert set(access("--allowed-hosts", "A.example, b").hosts) >= {"a.example", "b"}
    assert access("--allowed-origins", "http://a,http://b").origins == ["http://a", "http://b"]
    monkeypatch.setenv("OUTCORE_API_KEY", "settled")
    assert access(host="0.0.0.0").key == "settled"
    monkeypatch.setenv("OUTCORE_API_KEY", " ")
    with pytest.raises(UsageError, match="OUTCORE_API_KEY: empty"):
        access()


def test_a_key_may_lie_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTCORE_API_KEY", "other")
    file = tmp_path / "key"

    def key(*words: str) -> str | None:
        return serve.key_of(given("--api-key-file", str(file), *words))

    with pytest.raises(UsageError, match=r"--api-key-file .*No such file"):
        key()
    file.write_text("  secret\n")
    file.chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        key()
    file.chmod(0o600)
    assert key() == "secret"
    for bad in (b"", b" \n", b"\xff", b"a\nb", b"x" * 5000):
        file.write_bytes(bad)
        with pytest.raises(UsageError, match="--api-key-file"):
            key()
