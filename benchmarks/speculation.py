"""Tokens per sweep by what drafts, on texts that the model was not trained on.

    python benchmarks/speculation.py TARGET --code FILE --prose FILE --sources ngram,self:2,self:2+ngram,DRAFT+ngram

The model is all in memory; the control is told that a sweep takes as long for any number of tokens, and drafting no
time, as where the disk is the limit. ``+ngram``: with the text's own repetitions, as Outcore does it; without, the
model's guesses alone. Prompts are the 256 tokens before places spread over a text; in code, before a function's body.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

import outcore
from outcore.checkpoint.find_model import resolve_model
from outcore.decode import text_drafts
from outcore.decode.passes import HiddenKeeper
from outcore.decode.sampling import MlxLmSampler, make_sampler
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting, TextState
from outcore.decode.speculative.proposers import Proposer, drawn
from outcore.plan.joint_plan import MOST
from result_file import write_result

PROMPT = 256


@dataclass
class Result:
    """Of one source on one text at one temperature; ``accepted`` and ``drafted`` a sweep."""

    source: str
    text: str
    temp: float
    tokens: int
    sweeps: int
    drafted: float
    accepted: float
    tokens_per_sweep: float
    seconds: float


def prompts_of(tokenizer: Any, text: str, count: int, code: bool) -> list[list[int]]:
    """The last tokens before ``count`` places spread over a text; in code, after the line that begins a function."""
    step, found = len(text) // count, []
    for i in range(count):
        at = text.find("\n    def " if code else "\n", i * step + step // 2)
        end = text.find("\n", at + 1) + 1
        found.append(tokenizer.encode(text[max(0, end - 4 * PROMPT - 400) : end])[-PROMPT:])
    return found


def alone(
    self: Drafting,
    control: DraftLengthPolicy,
    how: MlxLmSampler | None,
    vocabulary: int,
    state: TextState,
    hidden: HiddenKeeper | None = None,
) -> Proposer:
    """The model's guesses without the text's repetitions."""
    found = self.proposer(partial(drawn, how=how, vocabulary=vocabulary, name=self.kind), state, hidden)
    assert found is not None
    return found


def run(target: Path, source: str, texts: dict[str, Path], args: argparse.Namespace) -> list[Result]:
    """Every text and temperature with one source."""
    draft, _, more = source.partition("+")
    model, tokenizer = outcore.load(
        str(target), memory=args.memory, dtype=args.dtype, draft=draft, context=PROMPT + args.tokens + 8, govern=False
    )
    usual = Drafting.source
    if not more and draft != "ngram":
        Drafting.source = alone  # type: ignore[method-assign]
    vars(text_drafts)["DraftLengthPolicy"] = lambda _, acceptance: DraftLengthPolicy(args.most, acceptance, fixed=True)
    found = []
    try:
        with model.outcore as session:
            for name, path in texts.items():
                prompts = prompts_of(tokenizer, path.read_text(), args.prompts, name == "code")
                for temp in args.temps:
                    session.metrics.reset()
                    made, sweeps, began = 0, 0, time.perf_counter()
                    for seed, prompt in enumerate(prompts):
                        mx.random.seed(seed)
                        last = True
                        responses = outcore.stream_generate(
                            model, tokenizer, prompt, max_tokens=args.tokens, sampler=make_sampler(temp)
                        )
                        for n, response in enumerate(responses):
                            if n == 0:
                                continue
                            made += 1
                            # A sweep ends with a token that was not drafted; the last may be cut short.
                            last = response.from_draft
                            sweeps += not last
                        sweeps += last and n > 0
                    metrics = session.metrics
                    found.append(
                        Result(
                            Path(draft).name + (f"+{more}" if more else ""),
                            name,
                            temp,
                            made,
                            sweeps,
                            round(metrics.drafted / max(sweeps, 1), 3),
                            round(metrics.accepted / max(sweeps, 1), 3),
                            round(made / max(sweeps, 1), 3),
                            round(time.perf_counter() - began, 2),
                        )
                    )
                    print(*vars(found[-1]).values(), sep="\t", file=sys.stderr, flush=True)
    finally:
        Drafting.source = usual  # type: ignore[method-assign]
        vars(text_drafts)["DraftLengthPolicy"] = DraftLengthPolicy
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Tokens per sweep by what drafts.")
    parser.add_argument("target", metavar="MODEL")
    parser.add_argument("--code", type=Path, metavar="FILE")
    parser.add_argument("--prose", type=Path, metavar="FILE")
    parser.add_argument("--sources", default="ngram,self:2,self:3,self:4,self:2+ngram,self:3+ngram,self:4+ngram")
    parser.add_argument("--temps", type=lambda t: [float(x) for x in t.split(",")], default=[0.0, 0.8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--most", type=int, default=MOST, help="drafted tokens a sweep at most (%(default)s)")
    parser.add_argument("--dtype")
    parser.add_argument("--memory", default="4GB")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    texts = {name: path for name in ("code", "prose") if (path := getattr(args, name)) is not None}
    folder = resolve_model(args.target)
    results: list[Result] = []
    for source in args.sources.split(","):
        results += run(folder, source, texts, args)
        write_result(args.json, "speculation", folder, results=[asdict(r) for r in results])
    return 0


if __name__ == "__main__":
    sys.exit(main())
