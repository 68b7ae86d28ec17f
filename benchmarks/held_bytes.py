"""What MLX holds while commands run, against the budget they were given: active memory and what it keeps for reuse.

    python benchmarks/held_bytes.py --json benchmarks/results/held-bytes-cpu.json

Tiny models of eight kinds on random float32 weights, with the demo model's tokenizer. Each is run with a budget that
has room for all of it and the longest prompt (``resident``), with a tenth more than the least that works, and no layer
in memory (``streamed``), and with room for all of it and a usual text (``outgrown``: the longest prompt makes it
stream, or is refused). Asked are `generate`, `chat` and `serve`, the last by one client and by four at once, with
prompts of each length, the longest last. A thread of the command's own process looks every 5 ms; what is held is never
to be more than ``--memory``. Beside it lies what the command says of itself. A result file that is there keeps what it
says of other kinds.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from shutil import copy
from typing import Any

import httpx
import mlx.core as mx

import _support  # noqa: F401
import zoo
from outcore.checkpoint.tokenizer import load_tokenizer
from outcore.decode.preparation import prepare
from outcore.plan.planner import resident_budget
from result_file import write_result

KINDS = {
    "dense": "qwen3", "window": "gemma3_text", "hybrid": "qwen3_5", "latents": "deepseek_v3", "experts": "qwen3_moe",
    "windows and experts": "gpt_oss", "attention beside a recurrence": "falcon_h1", "shared keys and values": "gemma3n",
}  # fmt: skip
VOCABULARY, POSITIONS, WINDOW = 8192, 16384, 512
LOOK_S = 0.005
TOKENS = 4
MORE = 64
"""Tokens that a chat's template may put around a message, and the answer's."""


@dataclass(frozen=True)
class Case:
    """One prompt, or several at once. Bytes.

    Attributes:
        prompt: tokens of each.
        held: the most that was seen of active memory and what MLX keeps together; ``active``, ``kept``: of which.
        said: the peak that the command itself tells.
        looks: that were taken meanwhile. refused: why there was no answer; empty: there was one.
    """

    kind: str
    memory: str
    face: str
    clients: int
    prompt: int
    budget: int
    held: int
    active: int
    kept: int
    said: int
    looks: int
    seconds: float
    refused: str = ""


class Looks:
    """What a process holds, tenth of a second by tenth of a second: the most of each, by ``time.monotonic``."""

    def __init__(self, file: Path) -> None:
        self._file, self._end = file, threading.Event()
        self._found: dict[int, tuple[int, int, int, int]] = {}
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._end.wait(LOOK_S):
            kept, active = mx.get_cache_memory(), mx.get_active_memory()
            while (kept, active) != (now := (mx.get_cache_memory(), mx.get_active_memory())):
                kept, active = now  # a buffer went from one to the other in between
            at = int(time.monotonic() * 10)
            most = self._found.get(at, (0, 0, 0, 0))
            self._found[at] = (*max(most[:3], (active + kept, active, kept)), most[3] + 1)

    def close(self) -> None:
        self._end.set()
        self._thread.join()
        self._file.write_text(json.dumps(self._found))


def between(file: Path, begin: float, end: float) -> dict[str, int]:
    """The most of that time."""
    found = {int(at): tuple(most) for at, most in json.loads(file.read_text()).items()}
    within = [most for at, most in found.items() if int(begin * 10) <= at <= int(end * 10)]
    held, active, kept, _ = max(within, default=(0, 0, 0, 0))
    return {"held": held, "active": active, "kept": kept, "looks": sum(most[3] for most in within)}


def watched(words: Sequence[str]) -> int:
    """Run a command in this process, and write down what it held."""
    from outcore.cli.main import main

    looks = Looks(Path(words[0]))
    try:
        return main(list(words[1:]))
    finally:
        looks.close()


def save(kind: str, folder: Path) -> Path:
    """A model of the kind, with a tokenizer."""
    name = KINDS[kind]
    more: dict[str, Any] = {"vocab_size": VOCABULARY, "max_position_embeddings": POSITIONS}
    config = zoo.CONFIGS[name]
    inner = config.get("text_config", config)
    if name != "gemma3n":  # of whose four layers two have keys and values of their own
        more |= {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
        if "layer_types" in inner:
            more["layer_types"] = inner["layer_types"][:2]
    if "sliding_window" in inner:
        more["sliding_window"] = WINDOW
    if "vocab_size_per_layer_input" in inner:
        more["vocab_size_per_layer_input"] = VOCABULARY
    zoo.CONFIGS[name] = config | more | ({"text_config": inner | more} if "text_config" in config else {})
    zoo.save_checkpoint(name, folder)
    demo = Path(str(resources.files("outcore_demo_model")))
    for file in demo.iterdir():
        if "token" in file.name or "template" in file.name or file.name == "generation_config.json":
            copy(file, folder)
    return folder


def budgets(folder: Path, longest: int) -> dict[str, int]:
    """By what they leave room for."""
    options: dict[str, Any] = {"draft": "none"}
    long = options | {"context": longest + MORE, "prompt": longest + MORE}
    whole = prepare(folder, memory="8GB", **long).profile.size
    usual = prepare(folder, memory="8GB", **options).profile.size
    least = prepare(folder, memory=1, least=True, **long).planning.smallest
    assert least is not None
    return {
        "resident": int(1.02 * resident_budget(whole)),
        "outgrown": int(1.02 * resident_budget(usual)),
        "streamed": int(1.1 * least),
    }


class Bench:
    """Asks one model."""

    def __init__(self, kind: str, folder: Path, prompts: Sequence[int], work: Path) -> None:
        self.kind, self.folder, self.prompts, self.work = kind, folder, prompts, work
        self._rng = random.Random(0)
        self._tokenizer = load_tokenizer(folder)
        self.cases: list[Case] = []

    def text(self, tokens: int) -> str:
        """A line of so many tokens, about; another one each time, so that nothing of it is found to be computed."""
        words = ["def", "return", "self", "import", "for", "in", "if", "not", "None", "print", "value", "list"]
        made = " ".join(self._rng.choices(words, k=tokens))
        return str(self._tokenizer.decode(self._tokenizer.encode(made)[:tokens]))

    def run(self, memory: str, budget: int) -> None:
        """All commands with that budget."""
        self._memory, self._budget = memory, budget
        for prompt in self.prompts:
            self._generate(prompt)
        self._chat()
        for clients in (1, 4):
            self._serve(clients)

    def _command(self, looks: Path, *words: str) -> list[str]:
        model = ["--model", str(self.folder), "--memory", f"{self._budget}B", "--max-tokens", str(TOKENS)]
        model += ["--resident", "0"] if self._memory == "streamed" else []
        return [sys.executable, __file__, "--watched", str(looks), *words, *model]

    def _note(self, face: str, clients: int, prompt: int, said: int, begin: float, end: float, refused: str) -> None:
        looks = between(self._looks, begin, end)
        self.cases.append(Case(
            self.kind, self._memory, face, clients, prompt, self._budget, said=said, seconds=round(end - begin, 2),
            refused=refused, **looks,
        ))  # fmt: skip
        case = self.cases[-1]
        over = "OVER" if case.held > case.budget else ""
        print(json.dumps(asdict(case)), f"{case.held / case.budget:.2f}", over, flush=True)

    @property
    def _looks(self) -> Path:
        return self.work / "looks.json"

    def _generate(self, prompt: int) -> None:
        begin = time.monotonic()
        done = subprocess.run(
            self._command(self._looks, "generate", "--json", "--prompt", "-", "--ignore-chat-template"),
            input=self.text(prompt), capture_output=True, text=True, check=False,
        )  # fmt: skip
        record = json.loads(done.stdout)
        refused = "" if done.returncode == 0 else str(record.get("error"))
        self._note("generate", 1, prompt, record.get("peak_memory_bytes", 0), begin, time.monotonic(), refused)

    def _chat(self) -> None:
        begin = time.monotonic()
        done = subprocess.run(
            self._command(self._looks, "chat", "--json"),
            input="".join(f"{self.text(prompt)}\nr\n" for prompt in self.prompts),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        record = json.loads(done.stdout)
        refused = "" if done.returncode == 0 else str(record.get("error"))
        turns = record.get("turns", [])
        if not refused and len(turns) < len(self.prompts):
            refused = " ".join(done.stderr.split())[-200:]
        self._note("chat", 1, self.prompts[-1], record.get("peak_memory_bytes", 0), begin, time.monotonic(), refused)

    @contextmanager
    def _server(self) -> Iterator[str]:
        words = self._command(self._looks, "serve", "--port", "0")
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://\S+", line)
            assert found, line
            yield found[0]
        finally:
            process.terminate()
            process.wait(120)

    def _serve(self, clients: int) -> None:
        phases: list[tuple[int, int, float, float, str]] = []
        with self._server() as address, httpx.Client(timeout=3600, trust_env=False) as http:

            def ask(text: str) -> str:
                body = {"prompt": text, "max_tokens": TOKENS, "temperature": 0}
                answer = http.post(f"{address}/v1/completions", json=body)
                return "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"

            for prompt in self.prompts:
                time.sleep(0.2)  # so that no tenth of a second is of two prompts
                begin = time.monotonic()
                with ThreadPoolExecutor(clients) as threads:
                    refused = list(threads.map(ask, [self.text(prompt) for _ in range(clients)]))
                end = time.monotonic()
                said = re.search(
                    r"^outcore_memory_peak_bytes (\S+)$", http.get(f"{address}/metrics").text, re.MULTILINE
                )
                phases.append(
                    (prompt, int(float(said[1])) if said else 0, begin, end, "; ".join(filter(None, refused)))
                )
        for prompt, peak, begin, end, refused_ in phases:
            self._note("serve", clients, prompt, peak, begin, end, refused_)


def main() -> int:
    if sys.argv[1:2] == ["--watched"]:
        return watched(sys.argv[2:])
    parser = argparse.ArgumentParser(description="What MLX holds while commands run, against their budgets.")
    parser.add_argument("--prompts", default="100,1000,8000")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--memories", default="resident,streamed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    prompts = [int(n) for n in args.prompts.split(",")]
    cases: list[Case] = []
    with tempfile.TemporaryDirectory() as root:
        work = Path(root)
        os.environ |= {"OUTCORE_CACHE": str(work / "cache"), "OUTCORE_CONFIG": os.devnull, "OUTCORE_MONITOR": "off"}
        for kind in args.kinds.split(","):
            bench = Bench(kind, save(kind, work / KINDS[kind]), prompts, work)
            sizes = budgets(bench.folder, max(prompts))
            for memory in args.memories.split(","):
                bench.run(memory, sizes[memory])
            cases += bench.cases
    rows = [asdict(case) for case in cases]
    over = sum(row["held"] > row["budget"] for row in rows)
    print(f"{len(rows)} cases, {over} above their budget, {sum(bool(row['refused']) for row in rows)} refused")
    if args.json is not None and args.json.exists():
        before = json.loads(args.json.read_text())["rows"]
        rows = [row for row in before if row["kind"] not in args.kinds.split(",")] + rows
    write_result(args.json, "held_bytes", Path.cwd(), look_s=LOOK_S, rows=rows)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
