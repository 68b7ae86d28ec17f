"""Whether drafting changes a token: greedy answers with every source against plain ones, model by model.

    python benchmarks/speculation_equality.py MODEL ... --drafts ngram,self:2,self:4,DRAFT --types all --json FILE

Models are computed in float32, streamed with nothing resident, and as many tokens are drafted as may be, worth it or
not. ``--types``: tiny random models of these types of mlx-lm, or ``all`` that run here; they are drafted for by
``self:4`` and by guesses that are right but for every third.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

import _support  # noqa: F401
import outcore
import zoo
from outcore.checkpoint.find_model import resolve_model
from outcore.decode import text_drafts
from outcore.decode.speculative.draft_length import DraftLengthPolicy
from outcore.decode.speculative.drafting import Drafting
from outcore.errors import OutcoreError
from result_file import write_result
from stand_ins import Oracle, TokensOnly


@dataclass
class Found:
    """One model with one source: of ``tokens`` tokens the first that differs, if any."""

    model: str
    source: str
    tokens: int
    differs_at: int | None
    drafted: int
    accepted: int
    note: str = ""


def answer(folder: Path, draft: str, prompt: Sequence[int], n: int, most: int) -> tuple[list[int], int, int]:
    """Tokens, and how many were drafted and accepted."""
    vars(text_drafts)["DraftLengthPolicy"] = lambda *_: DraftLengthPolicy(most, fixed=True)
    options: dict[str, Any] = {"resident": 0, "dtype": "float32", "context": len(prompt) + n, "prompt": len(prompt)}
    model, _ = outcore.load_model(folder, draft=draft, govern=False, **options)
    with model.outcore as session:
        made = [r.token for r in outcore.stream_generate(model, TokensOnly(), list(prompt), max_tokens=n)]
        return made, session.metrics.drafted, session.metrics.accepted


def compare(name: str, plain: Sequence[int], source: str, run: Callable[[], tuple[list[int], int, int]]) -> Found:
    try:
        made, drafted, accepted = run()
    except OutcoreError as e:
        return Found(name, source, 0, None, 0, 0, str(e))
    differs = next((i for i, (a, b) in enumerate(zip(plain, made, strict=False)) if a != b), None)
    found = Found(name, source, len(made), differs, drafted, accepted)
    print(name, source, "same" if differs is None else f"differs at {differs}", drafted, accepted, flush=True)
    return found


def trained(folder: Path, drafts: Sequence[str], n: int) -> list[Found]:
    prompt = [1 + (7 * i) % 97 for i in range(24)] * 2
    plain, *_ = answer(folder, "none", prompt, n, 8)
    return [compare(folder.name, plain, Path(d).name, lambda d=d: answer(folder, d, prompt, n, 8)) for d in drafts]  # type: ignore[misc]


def tiny(model_type: str, n: int) -> list[Found]:
    prompt = [3 + i % 40 for i in range(9)]
    usual = Drafting.source
    with tempfile.TemporaryDirectory() as folder:
        path = zoo.save_checkpoint(model_type, Path(folder) / "model")
        try:
            plain, *_ = answer(path, "none", prompt, n, 7)
        except ValueError as e:
            return [Found(model_type, "none", 0, None, 0, 0, f"fails by itself: {e}")]
        found = [compare(model_type, plain, "self:4", lambda: answer(path, "self:4", prompt, n, 7))]
        try:
            Drafting.source = lambda *_: Oracle([*prompt, *plain])  # type: ignore[method-assign]
            found.append(compare(model_type, plain, "oracle", lambda: answer(path, "ngram", prompt, n, 7)))
        finally:
            Drafting.source = usual  # type: ignore[method-assign]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers with every draft against plain ones.")
    parser.add_argument("models", nargs="*")
    parser.add_argument("--drafts", default="ngram,self:2,self:4")
    parser.add_argument("--types", default="")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    mx.set_default_device(mx.cpu)
    found: list[Found] = []
    for model in args.models:
        found += trained(resolve_model(model), args.drafts.split(","), args.tokens)
    types = zoo.RUNNABLE if args.types == "all" else [t for t in args.types.split(",") if t]
    for model_type in types:
        found += tiny(model_type, args.tokens)
        write_result(
            args.json,
            "speculation_equality",
            Path.cwd(),
            differ=sum(f.differs_at is not None for f in found),
            same=sum(f.differs_at is None and f.tokens > 0 for f in found),
            results=[asdict(f) for f in found],
        )
    return int(any(f.differs_at is not None for f in found))


if __name__ == "__main__":
    sys.exit(main())
