"""Long prompts against a running `outcore serve`: who waits for them, and whether they end when nobody wants them.

    python benchmarks/prompt_cancel.py MODEL --memory 100MB --json benchmarks/results/prompt-cancel-cpu.json

A prompt of 47 KB alone; the same beside an answer that is streamed, whose longest wait between two tokens counts; the
same from a client that leaves, after which another asks for two tokens; a prompt of 180,000 tokens that goes on, beside
which another asks for two; and SIGTERM in its middle. All the while another process asks for `/health`.
"""

from __future__ import annotations

import argparse
import http.client
import inspect
import json
import multiprocessing
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import mlx_lm.generate
import mlx_lm.server

from hostile_clients import probe, server
from result_file import write_result

COMPLETIONS = "/v1/completions"


def text_of(size: int) -> str:
    """Python, so many characters of it."""
    return (inspect.getsource(mlx_lm.generate) + inspect.getsource(mlx_lm.server))[:size]


class Client:
    """Asks one server."""

    def __init__(self, address: str) -> None:
        self.url = httpx.URL(address)

    def ask(self, prompt: str | list[int], tokens: int, *, stream: bool = False) -> http.client.HTTPConnection:
        """A connection on which a completion is asked for."""
        connection = http.client.HTTPConnection(self.url.host, self.url.port, timeout=900)
        body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0}
        connection.request("POST", COMPLETIONS, json.dumps(body), {"content-type": "application/json"})
        return connection

    def answer(self, prompt: str | list[int], tokens: int) -> tuple[float, dict[str, Any]]:
        """Seconds until it was there, and what was said."""
        began = time.perf_counter()
        connection = self.ask(prompt, tokens)
        reply = connection.getresponse()
        said = json.loads(reply.read())
        assert reply.status == 200, said
        connection.close()
        return time.perf_counter() - began, said

    def until_running(self, count: int) -> None:
        """Wait until so many choices are written."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            connection = http.client.HTTPConnection(self.url.host, self.url.port, timeout=60)
            connection.request("GET", "/health")
            if json.loads(connection.getresponse().read())["running"] >= count:
                return
            time.sleep(0.02)
        raise TimeoutError("the prompt was not begun")


class Stream:
    """A streamed answer, read by a thread; ``at``: when each of its parts came."""

    def __init__(self, client: Client, prompt: str, tokens: int) -> None:
        self.at: list[float] = []
        self.connection = client.ask(prompt, tokens, stream=True)
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()
        while len(self.at) < 3:
            time.sleep(0.01)

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            for line in self.connection.getresponse():
                if line.startswith(b"data: "):
                    self.at.append(time.perf_counter())

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between two parts, of those meanwhile."""
        at = [t for t in self.at if since <= t <= until]
        return [b - a for a, b in zip(at, at[1:], strict=False)] or [until - since]


@contextmanager
def probed(address: str) -> Iterator[dict[str, Any]]:
    """What ``/health`` took meanwhile."""
    found: dict[str, Any] = {}
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=probe, args=(address, 0, there))
    process.start()
    here.recv()
    try:
        yield found
    finally:
        here.send("end")
        seconds, failures = here.recv()
        process.join()
        found |= {"asked": len(seconds), "longest_s": round(max(seconds), 3), "failures": failures}


def measured(words: list[str], prompt: str, long: list[int], drain_s: float) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {}
    with server(words) as (process, address):
        client = Client(address)
        short = "import os\n"
        client.answer(short, 2)
        found["two_tokens_alone_s"] = min(client.answer(short, 2)[0] for _ in range(3))
        with probed(address) as health:
            seconds, said = client.answer(prompt + "\n#1", 1)
            found |= {"prompt_tokens": said["usage"]["prompt_tokens"], "prompt_alone_s": seconds}

            stream = Stream(client, "def main():\n", 1500)
            began = time.perf_counter()
            found["prompt_beside_stream_s"] = client.answer("#2\n" + prompt, 1)[0]
            gaps = stream.gaps(began, time.perf_counter())
            found |= {"stream_longest_gap_s": max(gaps), "stream_tokens_meanwhile": len(gaps)}
            stream.connection.sock.close() if stream.connection.sock else None
            stream.connection.close()
            time.sleep(2)

            left = client.ask("#3\n" + prompt, 2)
            client.until_running(1)
            time.sleep(0.5)
            left.close()
            found["two_tokens_after_one_left_s"] = client.answer(short, 2)[0]

            stays = client.ask(long, 2)
            client.until_running(1)
            time.sleep(1)
            found["two_tokens_beside_long_prompt_s"] = client.answer(short, 2)[0]
        found["health"] = health
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(drain_s + 120)
            found["gone_after_sigterm_s"] = time.perf_counter() - began
        except subprocess.TimeoutExpired:
            process.kill()
            found["gone_after_sigterm_s"] = None
        stays.close()
    with server(words) as (process, address):
        client = Client(address)
        left = client.ask(long, 2)
        client.until_running(1)
        time.sleep(1)
        left.close()
        began = time.perf_counter()
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(drain_s + 120)
            found["gone_after_sigterm_nobody_there_s"] = time.perf_counter() - began
        except subprocess.TimeoutExpired:
            process.kill()
            found["gone_after_sigterm_nobody_there_s"] = None
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="100MB")
    parser.add_argument("--drain", type=float, default=5.0, help="seconds; default: %(default)s")
    parser.add_argument("--bytes", type=int, default=47_000, help="of the prompt; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=180_000, help="of the long one; default: %(default)s")
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    words = ["-m", "outcore", "serve", "--model", str(args.model), "--memory", args.memory, "--drain", str(args.drain)]
    words += ["--max-context", str(args.tokens + 8), "--prefix-cache", "off", *more]
    found = measured(words, text_of(args.bytes), [5 + i % 500 for i in range(args.tokens)], args.drain)
    print(json.dumps(found, indent=1))
    write_result(args.json, "prompt_cancel", args.model, bytes=args.bytes, tokens=args.tokens, drain_s=args.drain, **found)


if __name__ == "__main__":
    main()
