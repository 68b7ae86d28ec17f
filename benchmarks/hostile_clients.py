"""Clients that mean ill, against a running `outcore serve`: who else is heard meanwhile, and what is left of them.

    python benchmarks/hostile_clients.py MODEL --memory 40MB --json benchmarks/results/hostile-clients-cpu.json
    python benchmarks/hostile_clients.py --fake

Attacks come one after the other: bodies that are not to be believed, halves of requests, bodies drop by drop, clients
that vanish in the middle of an answer, clients that never read, and thousands of connections that say nothing. All the
while another process asks for `/health`, each time on a new connection. Then everybody goes, and the server is to be
what it was: its memory, threads and open files, and its answer to the same question.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import multiprocessing
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]

import _support  # noqa: F401  # where hostile_bodies is
from hostile_bodies import bodies
from result_file import write_result

FAKE = Path(__file__).parents[1] / "tests" / "support" / "fake_serve.py"
CHAT = "/v1/chat/completions"
SETTLE_S = 120.0
WAVE = 200
"""Connections that are opened at the same time."""


@dataclass(frozen=True)
class Held:
    """What a process holds."""

    rss_bytes: int
    threads: int
    files: int


def held(process: psutil.Process) -> Held:
    """Now."""
    with process.oneshot():
        return Held(process.memory_info().rss, process.num_threads(), process.num_fds())


@contextmanager
def server(words: Sequence[str], nice: int = 0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server, and its address."""
    command = ["nice", "-n", str(nice), sys.executable, *words, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield process, found[0]
    finally:
        process.terminate()
        process.wait(120)


def probe(address: str, nice: int, results: Connection) -> None:
    """Ask for ``/health`` five times a second, on a new connection each time, until told to end."""
    os.nice(nice)
    seconds: list[float] = []
    failures: list[str] = []
    results.send("ready")
    url = httpx.URL(address)
    while not seconds or not results.poll(0.2):
        began = time.perf_counter()
        try:
            client = http.client.HTTPConnection(url.host, url.port, timeout=30)
            client.request("GET", "/health")
            answer = client.getresponse()
            if answer.status != 200:
                failures.append(f"{answer.status} {answer.read()[:100]!r}")
            client.close()
        except (OSError, http.client.HTTPException) as e:
            failures.append(f"{type(e).__name__}: {e}")
        seconds.append(time.perf_counter() - began)
    results.send((seconds, failures))


class Attacker:
    """Opens connections to one server; counts what it is told."""

    def __init__(self, address: str) -> None:
        url = httpx.URL(address)
        self.host, self.port = url.host, url.port or 80
        self.told: Counter[str] = Counter()

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection."""
        return await asyncio.open_connection(self.host, self.port)

    def request(self, body: bytes, more: str = "") -> bytes:
        """One for an answer, with this body."""
        head = f"POST {CHAT} HTTP/1.1\r\nhost: {self.host}\r\ncontent-length: {len(body)}\r\n{more}\r\n"
        return head.encode() + body

    async def hear(self, reader: asyncio.StreamReader) -> str:
        """What the server says last, by its status."""
        with suppress(OSError):
            data = await reader.read()
            if data:
                return data.split(b" ")[1].decode("latin-1") if data.startswith(b"HTTP/1.1 ") else "else"
        return "closed"

    async def each(self, count: int, attack: Callable[[int], Coroutine[Any, Any, str]]) -> None:
        """That many, all at once but for opening connections."""
        gate = asyncio.Semaphore(WAVE)

        async def one(n: int) -> None:
            async with gate:
                begun = asyncio.create_task(attack(n))
                await asyncio.sleep(0.01)
            try:
                self.told[await begun] += 1
            except OSError as e:
                self.told[type(e).__name__] += 1

        await asyncio.gather(*(one(n) for n in range(count)))

    async def odd_bodies(self, count: int) -> None:
        """One after the other, as fast as they are answered."""
        for body in bodies(16, count):
            reader, writer = await self.open()
            writer.write(self.request(body, "connection: close\r\n"))
            self.told[await self.hear(reader)] += 1
            writer.close()

    async def half_requests(self, count: int, head: bytes, drop: bytes, most_s: float) -> None:
        """Begin, and go on with a byte a second."""

        async def attack(n: int) -> str:
            reader, writer = await self.open()
            writer.write(head)
            heard, end = asyncio.create_task(self.hear(reader)), time.monotonic() + most_s
            while not heard.done() and time.monotonic() < end:
                writer.write(drop)
                await asyncio.wait((heard,), timeout=1)
            told = heard.result() if heard.done() else "still there"
            heard.cancel()
            writer.close()
            return told

        await self.each(count, attack)

    async def vanish(self, count: int) -> None:
        """Ask for a long answer, and go when it has begun, or is about to."""

        async def attack(n: int) -> str:
            reader, writer = await self.open()
            writer.write(self.request(asking(2000, stream=True)))
            with suppress(asyncio.TimeoutError, asyncio.IncompleteReadError):
                await asyncio.wait_for(reader.readuntil(b"data:"), 0.05 * (n % 20))
            writer.transport.abort()
            return "gone"

        await self.each(count, attack)

    async def never_read(self, count: int, most_s: float) -> None:
        """Ask for a long answer, and read nothing of it."""
        clients = []
        for _ in range(count):
            client = socket.socket()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            client.connect((self.host, self.port))
            client.sendall(self.request(asking(2000, stream=True)))
            clients.append(client)
        await asyncio.sleep(most_s)
        for client in clients:
            client.close()

    async def crowd(self, count: int, most_s: float) -> None:
        """Connections that say nothing, or next to nothing."""

        async def attack(n: int) -> str:
            reader, writer = await self.open()
            writer.write(b"GET / HTTP/1.1\r\nho"[: n % 19])
            told = "still there"
            with suppress(asyncio.TimeoutError):
                told = await asyncio.wait_for(self.hear(reader), most_s)
            writer.close()
            return told

        await self.each(count, attack)


def asking(tokens: int, stream: bool = False) -> bytes:
    """A body that is meant well."""
    messages = [{"role": "user", "content": "def read_lines(path):"}]
    return json.dumps({"messages": messages, "max_tokens": tokens, "temperature": 0, "stream": stream}).encode()


def answer(address: str, tokens: int = 16) -> str:
    """What the server answers."""
    found = httpx.post(f"{address}{CHAT}", content=asking(tokens), timeout=300, trust_env=False)
    found.raise_for_status()
    return str(found.json()["choices"][0]["message"]["content"])


ATTACKS: dict[str, Callable[[Attacker, argparse.Namespace], Coroutine[Any, Any, None]]] = {
    "bodies": lambda a, args: a.odd_bodies(args.bodies),
    "half headers": lambda a, args: a.half_requests(args.halves, a.request(b"x")[:-3] + b"x: ", b"x", 20),
    "slow bodies": lambda a, args: a.half_requests(args.halves, a.request(b" " * 1000)[:-999], b" ", 45),
    "vanishing clients": lambda a, args: a.vanish(args.vanishing),
    "clients that never read": lambda a, args: a.never_read(args.unread, 20),
    "connections": lambda a, args: a.crowd(args.connections, 20),
}


def warmed(address: str) -> None:
    """As many honest clients as are answered and wait at once: what they need is there when memory is looked at."""

    async def together(clients: int, tokens: int) -> None:
        unlimited = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=600, limits=unlimited, trust_env=False) as client:
            url = f"{address}{CHAT}"
            await asyncio.gather(*(client.post(url, content=asking(tokens)) for _ in range(clients)))

    asyncio.run(together(32, 64))
    asyncio.run(together(288, 4))


def settled(process: psutil.Process, before: Held, address: str) -> tuple[Held, float]:
    """What the process holds when it holds no more than before, and how long that took; or after ``SETTLE_S``."""
    began = time.monotonic()
    while True:
        state = httpx.get(f"{address}/health", timeout=30, trust_env=False).json()
        now, passed = held(process), time.monotonic() - began
        calm = state["running"] == state["waiting"] == 0
        if passed > SETTLE_S or (calm and now.files <= before.files and now.threads <= before.threads):
            return now, passed
        time.sleep(1)


def run(words: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """All attacks on a server of its own."""
    with server(words, args.nice) as (child, address):
        process = psutil.Process(child.pid)
        right = answer(address)
        begun = held(process)
        warmed(address)
        time.sleep(3)
        before = held(process)
        found: dict[str, Any] = {"begun": asdict(begun), "before": asdict(before), "rounds": []}
        print(f"after one answer: {begun}; after many: {before}", flush=True)
        for _ in range(args.rounds):
            load = os.getloadavg()[0]
            attacked = {name: attack(name, address, process, before, right, args) for name in ATTACKS}
            after, _ = settled(process, before, address)
            ratio = round(after.rss_bytes / before.rss_bytes, 4)
            found["rounds"].append(
                {"load_average": load, "attacks": attacked, "after": asdict(after), "memory_ratio": ratio}
            )
        return found


def attacking(name: str, address: str, args: argparse.Namespace, results: Connection) -> None:
    """In a process of its own, which others go before: attackers have machines of their own."""
    os.nice(19)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    attacker = Attacker(address)
    asyncio.run(ATTACKS[name](attacker, args))
    results.send(dict(attacker.told))


def attack(
    name: str, address: str, process: psutil.Process, before: Held, right: str, args: argparse.Namespace
) -> dict[str, Any]:
    """One attack, and what it did."""
    ours, theirs = multiprocessing.Pipe()
    prober = multiprocessing.get_context("spawn").Process(target=probe, args=(address, args.nice, theirs))
    prober.start()
    ours.recv()
    mine, its = multiprocessing.Pipe()
    began = time.monotonic()
    multiprocessing.get_context("spawn").Process(target=attacking, args=(name, address, args, its)).start()
    told = mine.recv()
    lasted, during = time.monotonic() - began, held(process)
    ours.send("end")
    seconds, failures = ours.recv()
    prober.join()
    after, settling = settled(process, before, address)
    found = {
        "seconds": round(lasted, 1),
        "told": told,
        "health_asked": len(seconds),
        "health_failures": failures,
        "health_longest_s": round(max(seconds), 3),
        "health_median_s": round(sorted(seconds)[len(seconds) // 2], 4),
        "during": asdict(during),
        "after": asdict(after),
        "settled_s": round(settling, 1),
        "same_answer": answer(address) == right,
    }
    print(f"{name}: {json.dumps(found)}", flush=True)
    return found


def failed(found: dict[str, Any]) -> list[str]:
    """What is not as it should be."""
    wrong, before = [], found["before"]
    for n, round_ in enumerate(found["rounds"], 1):
        for name, attack in round_["attacks"].items():
            where = f"round {n}, {name}"
            if attack["health_failures"]:
                wrong.append(f"{where}: /health failed: {attack['health_failures'][:3]}")
            if attack["health_longest_s"] >= 1:
                wrong.append(f"{where}: /health took {attack['health_longest_s']} s")
            if not attack["same_answer"]:
                wrong.append(f"{where}: the next answer is another")
        after = round_["after"]
        if round_["memory_ratio"] > 1.05:
            wrong.append(f"round {n}: {before['rss_bytes']} bytes of memory before, {after['rss_bytes']} after")
        held = [name for name in ("threads", "files") if after[name] > before[name]]
        wrong += [f"round {n}: {name}: {before[name]} before, {after[name]} after" for name in held]
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """Attack; the exit status says whether the server stood it."""
    parser = argparse.ArgumentParser(description="Clients that mean ill, against a running server.")
    parser.add_argument("model", nargs="?", help="A model to serve.")
    parser.add_argument("--fake", action="store_true", help="A server without a model, of the tests.")
    parser.add_argument("--memory", default="auto", help="The server's budget.")
    parser.add_argument(
        "--nice",
        type=int,
        default=0,
        metavar="N",
        help="Of the server and of who asks for /health, on a machine that others use too; negative ones take root.",
    )
    parser.add_argument("--rounds", type=int, default=2, help="Times that all of it is done; memory is not to grow.")
    parser.add_argument("--bodies", type=int, default=500)
    parser.add_argument("--halves", type=int, default=1000, help="Requests of which half comes.")
    parser.add_argument("--vanishing", type=int, default=500)
    parser.add_argument("--unread", type=int, default=100, help="Clients that never read.")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if (args.model is None) is not args.fake:
        parser.error("give a model, or --fake")
    fake = [str(FAKE)]
    words = fake if args.fake else ["-m", "outcore", "serve", args.model, "--memory", args.memory]
    found = run(words, args)
    wrong = failed(found)
    write_result(args.json, "hostile_clients", Path(args.model or "."), wrong=wrong, **found)
    for line in wrong or ["All as it was."]:
        print(line)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
