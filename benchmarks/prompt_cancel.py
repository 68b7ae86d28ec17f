"""Long prompts against a running `outcore serve`: who waits for them, and whether they end when nobody wants them.

    python benchmarks/prompt_cancel.py MODEL --memory 100MB --json benchmarks/results/prompt-cancel-cpu.json

A prompt of 8,000 tokens (47 KB) alone; the same beside an answer that is streamed, whose longest wait between two
tokens counts; the same from a client that leaves, after which another asks for two tokens; a prompt of 180,000 tokens
that goes on, beside which another asks for two; and SIGTERM in its middle. All the while another process asks for
`/health`. Nothing is found of what earlier runs kept.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from hostile_clients import probe, server
from result_file import write_result

COMPLETIONS = "/v1/completions"


def ids(count: int, first: int) -> list[int]:
    """A prompt of so many tokens that begins as no other does."""
    return [first, *(5 + i * 7 % 500 for i in range(count - 1))]


class Client:
    """Asks one server, whose model ends its texts with these tokens."""

    def __init__(self, address: str, ends: list[int]) -> None:
        self.url, self.ends = httpx.URL(address), ends

    def ask(self, prompt: str | list[int], tokens: int, *, stream: bool = False) -> http.client.HTTPConnection:
        """A connection on which a completion is asked for, which no token ends."""
        connection = http.client.HTTPConnection(self.url.host, self.url.port, timeout=900)
        bias = dict.fromkeys(map(str, self.ends), -100)
        body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0, "logit_bias": bias}
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
            assert self.thread.is_alive(), "it ended"
            time.sleep(0.01)

    def _read(self) -> None:
        with suppress(OSError, http.client.HTTPException, AttributeError, ValueError):
            for line in self.connection.getresponse():
                if line.startswith(b"data: "):
                    self.at.append(time.perf_counter())

    def gaps(self, since: float, until: float) -> list[float]:
        """Seconds between two parts, of those meanwhile."""
        at = [t for t in self.at if since <= t <= until]
        return [b - a for a, b in itertools.pairwise(at)] or [until - since]


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


def gone_s(process: subprocess.Popen[str], drain_s: float) -> float | None:
    """Seconds that it goes on after SIGTERM; None: it is there after a minute more than it may take."""
    began = time.perf_counter()
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(drain_s + 60)
    except subprocess.TimeoutExpired:
        process.kill()
        return None
    return time.perf_counter() - began


def measured(words: list[str], ends: list[int], tokens: int, most: int, drain_s: float) -> dict[str, Any]:
    """All of it."""
    found: dict[str, Any] = {}

    def told(**more: Any) -> None:
        found.update(more)
        print(more, file=sys.stderr, flush=True)

    with server(words) as (process, address):
        client = Client(address, ends)
        short = "import os\n"
        client.answer(short, 2)
        told(two_tokens_alone_s=min(client.answer(short, 2)[0] for _ in range(3)))
        with probed(address) as health:
            seconds, said = client.answer(ids(tokens, 11), 1)
            told(prompt_tokens=said["usage"]["prompt_tokens"], prompt_alone_s=seconds)

            stream = Stream(client, "def main():\n", 1500)
            began = time.perf_counter()
            told(prompt_beside_stream_s=client.answer(ids(tokens, 12), 1)[0])
            gaps = stream.gaps(began, time.perf_counter())
            told(stream_longest_gap_s=max(gaps), stream_tokens_meanwhile=len(gaps))
            stream.thread.join()

            left = client.ask(ids(tokens, 13), 2)
            client.until_running(1)
            time.sleep(0.5)
            left.close()
            told(two_tokens_after_one_left_s=client.answer(short, 2)[0])

            stays = client.ask(ids(most, 14), 2)
            client.until_running(1)
            time.sleep(1)
            told(two_tokens_beside_long_prompt_s=client.answer(short, 2)[0])
        told(health=health)
        told(gone_after_sigterm_s=gone_s(process, drain_s))
        stays.close()
    with server(words) as (process, address):
        client = Client(address, ends)
        left = client.ask(ids(most, 15), 2)
        client.until_running(1)
        time.sleep(1)
        left.close()
        told(gone_after_sigterm_nobody_there_s=gone_s(process, drain_s))
    return {k: round(v, 3) if isinstance(v, float) else v for k, v in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", default="100MB")
    parser.add_argument("--drain", type=float, default=5.0, help="seconds; default: %(default)s")
    parser.add_argument("--tokens", type=int, default=8_000, help="of a prompt; default: %(default)s")
    parser.add_argument("--most", type=int, default=180_000, help="tokens of the longest; default: %(default)s")
    parser.add_argument("--json", type=Path)
    args, more = parser.parse_known_args()
    words = ["-m", "outcore", "serve", "--model", str(args.model), "--memory", args.memory, "--drain", str(args.drain)]
    words += ["--max-context", str(args.most + 8), *more]
    ends = json.loads((args.model / "config.json").read_text())["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    with tempfile.TemporaryDirectory() as folder:
        os.environ["OUTCORE_CACHE"] = folder
        found = measured(words, ends, args.tokens, args.most, args.drain)
    print(json.dumps(found, indent=1))
    write_result(
        args.json, "prompt_cancel", args.model, tokens=args.tokens, most=args.most, drain_s=args.drain, **found
    )


if __name__ == "__main__":
    main()
