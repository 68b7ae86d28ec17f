"""Bodies that mean ill, against a running `outcore serve`: who else is heard meanwhile, and what memory they leave.

    python benchmarks/hostile_bodies_server.py MODEL --json benchmarks/results/hostile-bodies-server-cpu.json

One attack after the other on one server. All the while one process asks for `/health` every 20 ms on a connection that
stays, another asks again and again for two tokens, and the server's resident memory is read every 20 ms; it is read
again a minute after the attack.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

from hostile_clients import server
from result_file import write_result

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
OLLAMA, ANTHROPIC, RESPONSES = "/api/chat", "/v1/messages", "/v1/responses"
LARGE = 7_900_000
"""Bytes of a body just below what is taken."""

SOON_S, HEALTH_S, TOKENS_S, LEFT_BYTES = 0.02, 0.1, 3.0, 20_000_000
"""Between two looks; and what an answer of ``/health``, two tokens, and memory a minute later may take at most."""

HELLO = [{"role": "user", "content": "def read_lines(path):"}]


def function(n: int) -> dict[str, Any]:
    """A tool, in OpenAI's form."""
    return {"type": "function", "function": {"name": f"f{n}"}}


def call(n: int) -> dict[str, Any]:
    """A call of a tool, in Ollama's form."""
    return {"id": f"c{n}", "function": {"name": f"f{n}", "arguments": {}}}


def ollama_calls(count: int) -> list[dict[str, Any]]:
    """A message with so many calls, and their results in the other order."""
    results = [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in reversed(range(count))]
    return [*HELLO, {"role": "assistant", "content": "", "tool_calls": [call(n) for n in range(count)]}, *results]


def blocks(count: int) -> list[dict[str, Any]]:
    """A message of so many blocks, most of them thoughts, which are put together."""
    return [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "x" * 20}] * count}, *HELLO]


BODIES: dict[str, tuple[str, Callable[[], Any]]] = {
    "30,000 tools": (CHAT, lambda: {"messages": HELLO, "tools": [function(n) for n in range(30_000)]}),
    "20,000 calls (Ollama)": (OLLAMA, lambda: {"model": "m", "messages": ollama_calls(20_000)}),
    "60,000 blocks (Anthropic)": (ANTHROPIC, lambda: {"model": "m", "max_tokens": 2, "messages": blocks(60_000)}),
    "60,000 messages of one role (Anthropic)": (
        ANTHROPIC, lambda: {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "x" * 20}] * 60_000}
    ),
    "100,000 system messages": (CHAT, lambda: {"messages": [{"role": "system", "content": "x"}] * 100_000 + HELLO}),
    "100,000 system messages (Anthropic)": (
        ANTHROPIC,
        lambda: {"model": "m", "max_tokens": 2, "messages": [{"role": "system", "content": "x"}] * 100_000 + HELLO},
    ),
    "40,000 items of thought (responses)": (
        RESPONSES,
        lambda: {"input": [{"type": "reasoning", "summary": [{"type": "summary_text", "text": "x" * 20}]}] * 40_000},
    ),
    "a stop string of 4 million characters": (TEXT, lambda: {"prompt": "x", "max_tokens": 2, "stop": "ab" * 2_000_000}),
    "a stop string of 15.8 million characters": (
        TEXT, lambda: {"prompt": "x", "max_tokens": 2, "stop": "ab" * 7_900_000}
    ),
    "a schema of 8 MB": (
        CHAT,
        lambda: {"messages": HELLO, "max_tokens": 2, "format": "json", "json_schema": {
            "type": "object", "properties": {f"p{n:06}" * 10: {"type": "string"} for n in range(90_000)}}},
    ),
    "a grammar of 8 MB": (
        TEXT, lambda: {"prompt": "x", "max_tokens": 2, "grammar": "root ::= " + " | ".join(['"abcdefgh"'] * 600_000)}
    ),
    "999,999 values": (TEXT, lambda: {"prompt": "x", "max_tokens": 2, "metadata": [[]] * 499_000}),
    "a million token ids": (TEXT, lambda: {"prompt": [1] * 999_000, "max_tokens": 2}),
}  # fmt: skip
"""Attacks that are one body: where it goes, and what it is."""


def post(address: str, path: str, body: bytes, most_s: float = 120.0) -> str:
    """How a body is answered: the status, and the first words of what is wrong with it."""
    try:
        found = httpx.post(f"{address}{path}", content=body, timeout=most_s, trust_env=False)
    except httpx.HTTPError as e:
        return type(e).__name__
    return str(found.status_code) if found.is_success else f"{found.status_code} {said(found.content)}"


def said(content: bytes) -> str:
    """An error's message, in whatever form."""
    try:
        error = json.loads(content)["error"]
    except (ValueError, KeyError, TypeError):
        return content[:80].decode("utf-8", "replace")
    return str(error["message"] if isinstance(error, dict) else error)[:120]


def raw(address: str, data: bytes, most_s: float = 10.0) -> str:
    """How bytes are answered that are no request of a client's library."""
    url = httpx.URL(address)
    with socket.create_connection((url.host, url.port or 80), timeout=most_s) as client:
        client.sendall(data)
        try:
            answer = client.recv(65536)
        except (TimeoutError, ConnectionError) as e:
            return type(e).__name__
    head, _, rest = answer.partition(b"\r\n\r\n")
    return f"{head.split(b' ')[1].decode()} {said(rest)}" if head else "closed"


def one_body(name: str, address: str) -> Counter[str]:
    """One body."""
    path, make = BODIES[name]
    return Counter([post(address, path, json.dumps(make()).encode())])


def many_bodies(address: str) -> Counter[str]:
    """Sixteen of the largest, at once."""
    body = json.dumps({"prompt": "word " * (LARGE // 5), "max_tokens": 2}).encode()
    told: Counter[str] = Counter()
    threads = [threading.Thread(target=lambda: told.update([post(address, TEXT, body)])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def never_read(address: str) -> Counter[str]:
    """Eight clients that ask for long answers with all that can be told of them, and read nothing."""
    url = httpx.URL(address)
    ask = {"messages": HELLO, "max_tokens": 3000, "n": 3, "stream": True, "logprobs": True, "top_logprobs": 20}
    body = json.dumps(ask).encode()
    clients = []
    for _ in range(8):
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect((url.host, url.port or 80))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        clients.append(client)
    began, before, closed = time.monotonic(), late(address), 0
    while closed < len(clients) and time.monotonic() - began < 240:
        time.sleep(0.5)
        closed = late(address) - before
    for client in clients:
        client.close()
    return Counter({"closed by the server": closed, f"the last one after {time.monotonic() - began:.0f} s": 1})


def late(address: str) -> int:
    """Connections that the server has closed because of a time-out."""
    page = httpx.get(f"{address}/metrics", timeout=60, trust_env=False).text
    found = re.search(r"^outcore_connections_late_total ([0-9.]+)", page, re.MULTILINE)
    return int(float(found[1])) if found else 0


def large_header(address: str) -> Counter[str]:
    """Headers of 64 KB, in one piece and in several."""
    head = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n"
    one = head + b"x: " + b"y" * 65_536 + b"\r\n\r\n"
    several = head + b"".join(b"x%d: %b\r\n" % (n, b"y" * 1000) for n in range(65)) + b"\r\n"
    return Counter([raw(address, one), raw(address, several)])


def two_lengths(address: str) -> Counter[str]:
    """A body whose length is told in two ways."""
    both = b"content-length: 2\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    return Counter([raw(address, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n" + both)])


ATTACKS: dict[str, Callable[[str], Counter[str]]] = {
    **{name: functools.partial(one_body, name) for name in BODIES},
    "16 bodies of 7.9 MB": many_bodies,
    "8 clients that never read": never_read,
    "headers of 64 KB": large_header,
    "Content-Length with chunked": two_lengths,
}


def attacking(name: str, address: str, results: Connection) -> None:
    """In a process of its own, behind all others."""
    os.nice(19)
    results.send(dict(ATTACKS[name](address)))


def asking(address: str, path: str, body: bytes | None, pause_s: float, nice: int, results: Connection) -> None:
    """Ask again and again, until told to end; tells seconds and what went wrong."""
    os.nice(nice)
    seconds: list[float] = []
    wrong: list[str] = []
    with httpx.Client(timeout=180, trust_env=False) as client:
        client.get(f"{address}/health")
        results.send("ready")
        while not results.poll(pause_s) or not seconds:
            began = time.perf_counter()
            try:
                url = f"{address}{path}"
                found = client.get(url) if body is None else client.post(url, content=body)
                if not found.is_success:
                    wrong.append(f"{found.status_code} {said(found.content)}")
            except httpx.HTTPError as e:
                wrong.append(type(e).__name__)
            seconds.append(time.perf_counter() - began)
    results.send((seconds, wrong))


def began(target: Callable[..., None], *args: Any) -> Connection:
    """A process, and the pipe to it."""
    ours, theirs = multiprocessing.Pipe()
    multiprocessing.get_context("spawn").Process(target=target, args=(*args, theirs), daemon=True).start()
    return ours


def attack(name: str, address: str, process: psutil.Process, settle_s: float, nice: int) -> dict[str, Any]:
    """One attack, and what it did."""
    two = json.dumps({"prompt": "def read_lines(path):", "max_tokens": 2}).encode()
    asks = [began(asking, address, "/health", None, SOON_S, nice), began(asking, address, TEXT, two, 0.2, nice)]
    for each in asks:
        each.recv()
    time.sleep(0.5)
    before = peak = process.memory_info().rss
    start = time.monotonic()
    attacker = began(attacking, name, address)
    while not attacker.poll(SOON_S):
        peak = max(peak, process.memory_info().rss)
    told, lasted = attacker.recv(), time.monotonic() - start
    while time.monotonic() - start < lasted + 2:  # what it has begun goes on for a while
        peak = max(peak, process.memory_info().rss)
        time.sleep(SOON_S)
    found: dict[str, Any] = {"seconds": round(lasted, 1), "told": told}
    for what, ask in zip(("health", "two_tokens"), asks, strict=True):
        ask.send("end")
        seconds, wrong = ask.recv()
        found[what] = {"asked": len(seconds), "longest_s": round(max(seconds), 3),
                       "median_s": round(sorted(seconds)[len(seconds) // 2], 4), "failures": wrong[:3]}  # fmt: skip
    end = time.monotonic() + settle_s
    after = process.memory_info().rss
    while after > before + LEFT_BYTES / 10 and time.monotonic() < end:
        time.sleep(1)
        after = process.memory_info().rss
    found["rss_bytes"] = {"before": before, "peak": peak, "after": after}
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def failed(attacks: dict[str, dict[str, Any]]) -> list[str]:
    """What is not as it should be."""
    wrong = []
    for name, found in attacks.items():
        for what, most in (("health", HEALTH_S), ("two_tokens", TOKENS_S)):
            if found[what]["longest_s"] > most:
                wrong.append(f"{name}: {what} took {found[what]['longest_s']} s, more than {most:g}")
            wrong += [f"{name}: {what} failed: {failure}" for failure in found[what]["failures"]]
        left = found["rss_bytes"]["after"] - found["rss_bytes"]["before"]
        if left > LEFT_BYTES:
            wrong.append(f"{name}: {left / 1e6:.0f} MB of memory stay")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Attack; the exit status says whether the server stood it."""
    parser = argparse.ArgumentParser(description="Bodies that mean ill, against a running server.")
    parser.add_argument("model", help="A model to serve.")
    parser.add_argument("--memory", default="100MB", help="The server's budget.")
    parser.add_argument("--settle", type=float, default=60.0, help="Seconds after which memory has to be back.")
    parser.add_argument(
        "--nice", type=int, default=0, metavar="N", help="Of the server and of who asks it, where others compute too."
    )
    parser.add_argument("--only", action="append", choices=ATTACKS, help="This attack; again for others.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    load = os.getloadavg()[0]
    with server(["-m", "outcore", "serve", args.model, "--memory", args.memory], args.nice) as (child, address):
        process = psutil.Process(child.pid)
        # What every server needs that answers at all is there before memory is looked at.
        for _ in range(3):
            post(address, TEXT, json.dumps({"prompt": "def f(", "max_tokens": 16}).encode())
            post(address, CHAT, json.dumps({"messages": HELLO, "max_tokens": 16}).encode())
        attacks = {name: attack(name, address, process, args.settle, args.nice) for name in args.only or ATTACKS}
    wrong = failed(attacks)
    write_result(args.json, "hostile_bodies_server", Path(args.model), load_average=load, wrong=wrong, attacks=attacks)
    for line in wrong or ["All as it was."]:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
