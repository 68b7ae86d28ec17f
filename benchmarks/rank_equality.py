"""Models whose layers lie on several ranks: the text and every logit equal those of one rank, bit for bit.

    python benchmarks/rank_equality.py [TYPE ...] [--ranks 2,4] [--ways NAME] [--json FILE]

For a tiny random model of every type in mlx-lm that can be constructed (tests/support/zoo.py): ranks are processes of
this machine, joined by pipes. Layers alternate: in memory, streamed, and streamed with the head and a part of the
layers; and lie one behind the other in memory. So with tokens that a copy on the first rank drafts. A prompt of 40
tokens in chunks of 16, then 24 tokens, greedy; of each token the log-probabilities of the whole vocabulary are
compared, by a digest of their bits.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import _support  # noqa: F401
import rank_work
import zoo
from rank_processes import RankProcesses
from result_file import shown_arguments

TOKENS = 24

DRAFTED = {"num_draft_tokens": 4}

WAYS: dict[str, dict[str, Any]] = {
    "in memory": {},
    "streamed": {"resident": 0},
    "head streamed too": {"resident": 0, "head_resident": False},
    "one layer in memory": {"resident": 1},
    "in memory, in blocks": {"in_turn": False},
    "streamed, in blocks": {"in_turn": False, "resident": 0},
    "drafted": {"resident": 0, "draft": "self:8", "how": DRAFTED},
    "drafted, in blocks": {"in_turn": False, "draft": "self:8", "how": DRAFTED},
}
"""How layers are held. In blocks: layers of one rank follow each other. Drafted: by a copy on the first rank."""


@dataclass
class Result:
    """One type's comparison.

    Attributes:
        ranks: 2 or more. ``differences``: ways whose text or logits differ from one rank's.
        layers: of each rank, at most and at least. ``drafted``: tokens, and those of them that were right.
        refused: why it cannot be shared out; None: it can.
        error: what went wrong; None: nothing.
    """

    model: str
    ranks: int
    differences: list[str] = field(default_factory=list)
    layers: tuple[int, int] = (0, 0)
    drafted: tuple[int, int] = (0, 0)
    refused: str | None = None
    error: str | None = None
    seconds: float = 0.0

    @property
    def equal(self) -> bool:
        """Whether all is as on one rank."""
        return not (self.differences or self.refused or self.error)


def compare(model_type: str, folder: Path, ranks: RankProcesses, size: int, ways: list[str]) -> Result:
    """One type, by these ways."""
    result, began = Result(model_type, size), time.perf_counter()
    expected, _ = rank_work.text(None, folder, TOKENS)
    for name, options in ((name, WAYS[name]) for name in ways):
        if options.get("resident") and not result.layers[1]:
            continue  # some rank has no layer that could stay
        found = ranks.run(rank_work.with_options, folder, TOKENS, options)
        if isinstance(found[0], str):
            result.refused = found[0]
            break
        if found[0][0] != expected:
            at = next(n for n, (a, b) in enumerate(zip(found[0][0], expected, strict=False)) if a != b)
            result.differences.append(f"{name}: from token {at} on")
        if any([t for t, _ in told] != [t for t, _ in expected] for told, _ in found[1:]):
            result.differences.append(f"{name}: ranks disagree")
        counts = [did["layers"] for _, did in found]
        result.layers = (max(counts), min(counts))
        did = found[0][1]
        result.drafted = (result.drafted[0] + did["drafted"], result.drafted[1] + did["accepted"])
    result.seconds = round(time.perf_counter() - began, 2)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare several ranks' texts and logits with one's, bit for bit.")
    parser.add_argument("types", nargs="*", metavar="TYPE")
    parser.add_argument("--ranks", default="2,4", help="(default: 2,4)")
    parser.add_argument("--ways", action="append", choices=list(WAYS), help="(default: all)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["OUTCORE_CACHE"] = str(Path(scratch) / "cache")
        for size in map(int, args.ranks.split(",")):
            results += _all(args.types or list(zoo.RUNNABLE), size, Path(scratch), args.ways or list(WAYS))
    refused = sorted({r.model for r in results if r.refused})
    for name in refused:
        print(f"refused: {name}: {next(r.refused for r in results if r.model == name)}")
    for size in sorted({r.ranks for r in results}):
        of = [r for r in results if r.ranks == size]
        equal, no = sum(r.equal for r in of), sum(bool(r.refused) for r in of)
        print(f"{size} ranks: {equal} of {len(of)} types equal, {no} refused")
    if args.json is not None:
        versions = {name: version(name) for name in ("mlx", "mlx-lm", "outcore")}
        command = ["benchmarks/rank_equality.py", *shown_arguments()]
        document = {"versions": versions, "command": command, "ways": WAYS, "results": [asdict(r) for r in results]}
        args.json.write_text(json.dumps(document, indent=1))
    return 0 if all(r.equal or r.refused for r in results) else 1


def _all(types: list[str], size: int, scratch: Path, ways: list[str]) -> list[Result]:
    results: list[Result] = []
    ranks: RankProcesses | None = None
    for model_type in types:
        folder = scratch / model_type
        if not folder.exists():
            zoo.save_checkpoint(model_type, folder)
        ranks = ranks or RankProcesses(size)
        try:
            result = compare(model_type, folder, ranks, size, ways)
        except Exception as e:  # a table with a failed row says more than none
            result = Result(model_type, size, error=f"{type(e).__name__}: {e}")
            ranks.close()
            ranks = None
        results.append(result)
        how = (
            "equal"
            if result.equal
            else "refused"
            if result.refused
            else f"NOT EQUAL {result.differences} {result.error}"
        )
        drafted = f", {result.drafted[1]} of {result.drafted[0]} drafted tokens right" if result.drafted[0] else ""
        print(f"{model_type}, {size} ranks: {how}{drafted}", file=sys.stderr, flush=True)
    if ranks is not None:
        ranks.close()
    return results


if __name__ == "__main__":
    sys.exit(main())
