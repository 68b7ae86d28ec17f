"""``outcore list``: the models in the Hub's cache, and what each would need on this machine. Headers alone are read."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import OutcoreError
from ..text import one_line, shortened
from .importing import importing_mlx
from .parser import Parser

if TYPE_CHECKING:
    from huggingface_hub import CachedRepoInfo

WIDTH = 120
"""Characters of a line where standard output is no terminal."""

REASON = 90
"""Characters of a reason at most."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="outcore list",
        description="The models in the Hugging Face Hub's cache: what each takes on the disk, the smallest budget that "
        "it runs in, the one from which all of it is resident, and what it would do here. Loads and fetches nothing.",
    )
    parser.add_argument("--cache-dir", metavar="DIR", help="Another cache of the Hub. Default: the Hub's own.")
    parser.add_argument("--memory", metavar="SIZE", help="The budget to compare with. Default: what would be used.")
    parser.add_argument("--context", type=int, help="Tokens of prompt and answer to plan for. Default: 2048.")
    parser.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    return parser


@dataclass(frozen=True)
class Found:
    """A model in the Hub's cache.

    Attributes:
        folder: of the revision that its name stands for; None where there is none.
        nbytes: of all its revisions on the disk.
    """

    name: str
    folder: Path | None
    nbytes: int


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        UsageError: a size or a number that cannot be meant.
    """
    args = setup_arg_parser().parse_args(argv)
    with importing_mlx():
        from ..options import whole
        from ..sizes import format_size
        from ..system.memory import asked_budget

    if args.context is not None:
        whole("--context", args.context)
    budget = asked_budget(args.memory, "balanced")
    models, broken = cached_models(args.cache_dir)
    rows = [_row(found, args.context, budget) for found in models]
    rows += [_refused(name, 0, why) for name, why in broken]
    rows.sort(key=lambda r: str(r["model"]).lower())
    if args.json:
        print(json.dumps({"budget_bytes": budget, "context": args.context, "models": rows}))
        return
    if not rows:
        print("no models in the Hub's cache; outcore generate --model owner/name fetches one")
        return
    _show(rows)
    print(
        f"Here: with a budget of {format_size(budget)}{'' if args.memory else ', what would be used without --memory'}."
    )


def cached_models(folder: str | None) -> tuple[list[Found], list[tuple[str, str]]]:
    """The models in the Hub's cache, and what there is broken with the reason. Asks no network."""
    from huggingface_hub import CacheNotFound, scan_cache_dir

    try:
        info = scan_cache_dir(folder)
    except (CacheNotFound, ValueError):  # not there, or a file
        return [], []
    models = [Found(r.repo_id, _snapshot(r), r.size_on_disk) for r in info.repos if r.repo_type == "model"]
    return models, list(_broken(info.warnings))


def _broken(warnings: Sequence[Exception]) -> Iterator[tuple[str, str]]:
    for warning in warnings:
        said = one_line(warning)
        # It names the folder, and nothing else does: models--owner--name.
        _, there, rest = said.partition("models--")
        if there:
            name = rest.split("/")[0].split(" ")[0].rstrip(".,:)'\"").replace("--", "/")
            yield name, f"not whole in the Hub's cache: {said.partition(': ')[0]}"


def _snapshot(repo: CachedRepoInfo) -> Path | None:
    """What ``--model`` would open: the main branch, or what was fetched last."""
    newest = sorted(repo.revisions, key=lambda r: r.last_modified, reverse=True)
    main = [r for r in newest if "main" in r.refs]
    return next((r.snapshot_path for r in [*main, *newest]), None)


def _row(found: Found, context: int | None, budget: int) -> dict[str, Any]:
    """What there is to say of a model."""
    import gc

    from ..loading.preparation import prepare
    from ..planning.planner import resident_budget

    if found.folder is None:
        return _refused(found.name, found.nbytes, "nothing of it was fetched")
    try:
        with redirect_stdout(sys.stderr):  # what mlx-lm has to say
            prepared = prepare(found.folder, memory=f"{budget}B", context=context, least=True)
    except OutcoreError as e:
        # Where is known: what stands before the reason is the folder.
        why = one_line(e).removeprefix(f"{found.folder}: ").replace(f"{found.folder}/", "")
        return _refused(found.name, found.nbytes, why)
    except Exception as e:  # a model's own configuration, in mlx-lm's hands: it raises what it likes
        return _refused(found.name, found.nbytes, f"mlx-lm cannot open it: {one_line(e)}")
    smallest, resident = prepared.plan.smallest_budget_bytes, resident_budget(prepared.survey.size)
    here = "all resident" if resident <= budget else "streams" if smallest <= budget else "does not fit"
    row = {
        "model": found.name,
        "folder": str(found.folder),
        "model_type": prepared.survey.lazy.config.get("model_type"),
        "disk_bytes": found.nbytes,
        "weight_bytes": prepared.survey.lazy.checkpoint.nbytes,
        "context": prepared.survey.size.context,
        "smallest_budget_bytes": smallest,
        "resident_budget_bytes": resident,
        "here": here,
        "reason": None,
    }
    del prepared
    gc.collect()  # modules may be in cycles
    return row


def _refused(name: str, nbytes: int, why: str) -> dict[str, Any]:
    return {"model": name, "disk_bytes": nbytes, "here": None, "reason": shortened(why, REASON)}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    from ..sizes import format_size

    table = Table(box=None, pad_edge=False)
    table.add_column("model", overflow="fold")
    for name in ("on disk", "smallest budget", "all resident from"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("here", overflow="fold")
    for r in rows:
        sizes = ["-", "-"]
        if r["reason"] is None:
            sizes = [format_size(r[n], round_up=True) for n in ("smallest_budget_bytes", "resident_budget_bytes")]
        table.add_row(r["model"], format_size(r["disk_bytes"]), *sizes, r["here"] or r["reason"])
    width = None if sys.stdout.isatty() else max([WIDTH, *(len(r["model"]) + REASON + 60 for r in rows)])
    Console(markup=False, emoji=False, highlight=False, width=width).print(table)
