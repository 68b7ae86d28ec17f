"""Tokens per second with a draft and without, in turns, through a reader that is limited to a stated rate.

    python benchmarks/speculation_speed.py MODEL --text FILE --rate 60MB --draft self:3 --dtype float32 --json FILE

Nothing is resident, and both are the same loaded model. The limited reader stands for a disk that is slow beside
computing, as it is for a large model on a GPU; without ``--rate`` it is this machine's disk, which is fast beside its
processor.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

import outcore
from limited_reader import limit_reads
from outcore.checkpoint.find_model import resolve_model
from outcore.checks import parse_size
from outcore.decode import text_drafts
from outcore.decode.sampling import make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.decode.speculative.proposers import Guess, Proposer
from result_file import write_result
from speculation import PROMPT, prompts_of


@dataclass
class Run:
    """One answer after its first token; ``guessing``: seconds until there were guesses."""

    draft: str
    prompt: int
    tokens: int
    seconds: float
    sweeps: int
    drafted: int
    accepted: int
    guessing: float


class Timed(DraftLengthPolicy):
    """A control that knows how long it took."""

    guessing = 0.0

    def draft(self, *args: Any) -> list[Guess]:
        began = time.perf_counter()
        try:
            return super().draft(*args)
        finally:
            Timed.guessing += time.perf_counter() - began


class Wrong:
    """A source whose guesses take their time and are all changed to another token: a text that nobody foresees."""

    cheaper = None

    def __init__(self, source: Proposer) -> None:
        self.name, self._source, self._right = source.name, source, list[int]()

    def begin(self, text: Sequence[int]) -> None:
        self._right.clear()
        self._source.begin(text)

    def guess(self, drafted: Sequence[int]) -> Guess | None:
        guess = self._source.guess(self._right)
        if guess is None:
            return None
        self._right.append(guess.token)
        return replace(guess, token=guess.token + 1 if guess.token < FEW else guess.token - 1, others=())


FEW = 4096
"""Tokens that any vocabulary has."""


def answer(
    loaded: tuple[Any, Any, Drafting | None],
    draft: str,
    n: int,
    prompt: list[int],
    args: argparse.Namespace,
    tokens: int,
) -> Run:
    model, tokenizer, drafting = loaded
    metrics = model.outcore.metrics
    model.outcore.drafting = None if draft == "none" else drafting
    mx.random.seed(n)
    responses = outcore.stream_generate(model, tokenizer, prompt, max_tokens=tokens, sampler=make_sampler(args.temp))
    next(responses)
    metrics.reset()
    Timed.guessing, began = 0.0, time.perf_counter()
    made = sum(1 for _ in responses)
    seconds = time.perf_counter() - began
    return Run(Path(draft).name, n, made, seconds, metrics.sweeps, metrics.drafted, metrics.accepted, Timed.guessing)


def summary(runs: list[Run], draft: str) -> dict[str, Any]:
    """Speed-up of the draft over none, over all prompts, beside its tokens per sweep."""

    def rate(which: str) -> float:
        mine = [r for r in runs if r.draft == which]
        return sum(r.tokens for r in mine) / sum(r.seconds for r in mine)

    drafted = [r for r in runs if r.draft == draft]
    per_sweep = sum(r.tokens for r in drafted) / max(1, sum(r.sweeps for r in drafted))
    plain = {r.prompt: r.tokens / r.seconds for r in runs if r.draft == "none"}
    return {
        "plain_tps": rate("none"),
        "draft_tps": rate(draft),
        "speedup": rate(draft) / rate("none"),
        "tokens_per_sweep": per_sweep,
        "speedup_over_tokens_per_sweep": rate(draft) / rate("none") / per_sweep,
        "median_speedup_of_a_prompt": statistics.median(r.tokens / r.seconds / plain[r.prompt] for r in drafted),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Speed with a draft and without.")
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--rate", metavar="SIZE", help="bytes a second that the reader is limited to")
    parser.add_argument("--draft", default="ngram")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--plain-tokens", type=int, help="without a draft, where each takes as long (as --tokens)")
    parser.add_argument("--warmup", type=int, default=4, help="tokens before, not counted (%(default)s)")
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--wrong", action="store_true", help="change every guess, so that nothing is accepted")
    parser.add_argument("--temp", type=float, default=0.0)
    parser.add_argument("--dtype")
    parser.add_argument("--memory", default="1GB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    folder = resolve_model(args.model)
    vars(text_drafts)["DraftLengthPolicy"] = Timed
    if args.wrong:
        usual = Drafting.source
        Drafting.source = lambda *given: Wrong(usual(*given))  # type: ignore[method-assign]
    if args.rate:
        limit_reads(parse_size(args.rate))
    drafts = ["none", args.draft]
    options = {"memory": args.memory, "resident": 0, "dtype": args.dtype, "govern": False}
    context = {"context": PROMPT + args.tokens + 8, "prompt": PROMPT}
    # One model for both: how fast it is here depends on where its slots lie in memory.
    model, tokenizer = outcore.load(str(folder), draft=args.draft, **options, **context)
    loaded = model, tokenizer, model.outcore.drafting
    prompts = prompts_of(tokenizer, args.text.read_text(), args.prompts, "code" in args.text.name)
    runs: list[Run] = []
    for n, prompt in enumerate([prompts[0], *prompts]):
        # In turn, and a little of the first prompt before that to warm up.
        for draft in drafts if n % 2 else drafts[::-1]:
            length = args.plain_tokens or args.tokens if draft == "none" else args.tokens
            runs.append(answer(loaded, draft, n, prompt, args, length if n else min(length, args.warmup)))
            print(*vars(runs[-1]).values(), sep="\t", file=sys.stderr, flush=True)
    model.outcore.close()
    found = summary([r for r in runs if r.prompt], Path(args.draft).name)
    print(json.dumps(found, indent=1))
    write_result(
        args.json,
        "speculation_speed",
        folder,
        reader=f"limited to {args.rate} a second" if args.rate else "this machine's disk",
        summary=found,
        runs=[asdict(r) for r in runs],
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
