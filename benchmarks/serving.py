"""What `outcore serve` makes of many clients behind a slow disk: sweeps, tokens a second, and whose answer is whose.

    python benchmarks/serving.py MODEL --memory 400MB --disk 250MB --json benchmarks/results/serving-cpu.json

A server is started, with ``--disk`` on a disk that gives so many bytes a second (a control group of version 1, `blkio`,
which takes root). Asked are: one client; 16 clients of 12 tokens at once; 32 clients; clients that come while others
are being answered; and one client with drafts beside `outcore generate` with them. Each answer is compared with the one
that its prompt gets alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from outcore.checks import parse_size
from result_file import write_result
from slow_disk import slow_disk

OUTCORE = sys.executable, "-m", "outcore"


def command(group: Path | None, *words: str, outcore: Sequence[str] = OUTCORE) -> list[str]:
    """One of Outcore's, in that group; ``outcore``: what it is started as."""
    ours = [*outcore, *words]
    return ours if group is None else ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *ours]


@contextmanager
def server(group: Path | None, words: Sequence[str], outcore: Sequence[str] = OUTCORE) -> Iterator[str]:
    """`outcore serve` in that group; its address."""
    started = command(group, "serve", "--port", "0", *words, outcore=outcore)
    process = subprocess.Popen(started, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, line
        yield found[0]
    finally:
        process.terminate()
        process.wait(60)


class Clients:
    """Ask one server.

    Args:
        tokens: of an answer, where nothing else is asked for.
    """

    def __init__(self, address: str, tokens: int) -> None:
        self.address, self.tokens = address, tokens

    async def _ask(self, http: httpx.AsyncClient, prompt: str, tokens: int) -> str:
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0}
        answer = await http.post(f"{self.address}/v1/completions", json=body)
        answer.raise_for_status()
        return str(answer.json()["choices"][0]["text"])

    def sweeps(self) -> int:
        """That it has made so far."""
        text = httpx.get(f"{self.address}/metrics").text
        found = re.search(r"^outcore_sweeps_total\{.*\} (\S+)$", text, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def ask(self, prompts: Sequence[str], tokens: int | None = None, apart_s: float = 0.0) -> dict[str, Any]:
        """All of them at once, or each so many seconds after the one before."""
        tokens = tokens or self.tokens

        async def one(http: httpx.AsyncClient, n: int, prompt: str) -> str:
            await asyncio.sleep(n * apart_s)
            return await self._ask(http, prompt, tokens)

        async def together() -> list[str]:
            limits = httpx.Limits(max_connections=None)
            async with httpx.AsyncClient(timeout=None, limits=limits) as http:
                return await asyncio.gather(*(one(http, n, p) for n, p in enumerate(prompts)))

        before, began = self.sweeps(), time.perf_counter()
        texts = asyncio.run(together())
        seconds = time.perf_counter() - began
        print(f"{len(prompts)} clients, {tokens} tokens each: {seconds:.1f} s", file=sys.stderr, flush=True)
        return {
            "clients": len(prompts),
            "tokens_each": tokens,
            "sweeps": self.sweeps() - before,
            "seconds": round(seconds, 2),
            "tokens_per_s": round(len(prompts) * tokens / seconds, 3),
            "texts": texts,
        }


def generated(group: Path | None, words: Sequence[str], prompt: str, tokens: int) -> dict[str, Any]:
    """What `outcore generate` says of the same."""
    asked = [
        "generate",
        *words,
        "--prompt",
        prompt,
        "--ignore-chat-template",
        "-m",
        str(tokens),
        "--temp",
        "0",
        "--json",
    ]
    done = subprocess.run(command(group, *asked), capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {"sweeps": found["sweeps"], "tokens_per_s": found["generation_tps"], "texts": [found["text"]]}


def many(group: Path | None, words: Sequence[str], prompts: Sequence[str], tokens: int) -> dict[str, Any]:
    """One client and many, without drafts."""
    rows: dict[str, Any] = {}
    with server(group, [*words, "--draft", "none"]) as address:
        clients = Clients(address, tokens)
        clients.ask(prompts[:1], 2)
        rows["one"] = clients.ask(prompts[:1])
        alone = {p: clients.ask([p], 12)["texts"][0] for p in prompts[:2]}
        rows["sixteen of 12 tokens"] = clients.ask([prompts[n % 2] for n in range(16)], 12)
        rows["thirty-two"] = clients.ask(prompts)
        sweep_s = rows["one"]["seconds"] / max(1, rows["one"]["sweeps"])
        rows["coming and going"] = clients.ask([prompts[n % 2] for n in range(8)], 12, apart_s=2.5 * sweep_s)
        rows["one again"] = clients.ask(prompts[:1])
    for name in ("sixteen of 12 tokens", "coming and going"):
        rows[name]["answers_equal"] = sum(t == alone[prompts[n % 2]] for n, t in enumerate(rows[name]["texts"]))
    rows["one again"]["answers_equal"] = rows["one again"]["texts"] == rows["one"]["texts"]
    return rows


def with_drafts(group: Path | None, words: Sequence[str], prompt: str, tokens: int, draft: str) -> dict[str, Any]:
    """One client beside `outcore generate`."""
    rows = {"generate, drafts": generated(group, [*words, "--draft", draft], prompt, tokens)}
    with server(group, [*words, "--draft", draft]) as address:
        rows["one, drafts"] = Clients(address, tokens).ask([prompt])
    rows["one, drafts"]["answers_equal"] = rows["one, drafts"]["texts"] == rows["generate, drafts"]["texts"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--memory", required=True)
    parser.add_argument("--disk", help="bytes a second; as fast as it is where it is not given")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    words = ["--model", str(args.model), "--memory", args.memory]
    prompts = [f"Client {n}: once upon a time there was a number {n * 7919 % 1000} and" for n in range(32)]
    rate = None if args.disk is None else parse_size(args.disk)
    with slow_disk(args.model, rate) as group:
        rows = many(group, words, prompts, args.tokens)
        rows |= with_drafts(group, words, "one two three four " * 8, 2 * args.tokens, args.draft)
    rows["thirty-two"]["times_one"] = round(rows["thirty-two"]["tokens_per_s"] / rows["one"]["tokens_per_s"], 2)
    for name, row in rows.items():
        row.pop("texts")
        print(f"{name}: {row}")
    write_result(args.json, "serving", args.model, disk_bytes_per_s=rate, rows=rows)


if __name__ == "__main__":
    main()
