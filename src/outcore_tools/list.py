"""``outcore list``: the models in the Hub's cache, and what each would need on this machine. Headers alone are read."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from typing import Any

from huggingface_hub import CachedRepoInfo, CacheNotFound, scan_cache_dir

from outcore.checks import whole
from outcore.cli.console import console, table
from outcore.decode.budget import asked_budget
from outcore.decode.preparation import prepare
from outcore.errors import OutcoreError
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size
from outcore.text import one_line, shortened

REASON = 90
"""Characters of a reason at most."""


def run(args: argparse.Namespace) -> None:
    if args.context is not None:
        whole("--context", args.context)
    budget = asked_budget(args.memory)
    rows: list[dict[str, Any]] = []
    try:
        info = scan_cache_dir(args.cache_dir)
        rows += [_row(r, args.context, budget) for r in info.repos if r.repo_type == "model"]
        rows += _broken(info.warnings)
    except (CacheNotFound, ValueError):  # not there, or a file
        pass
    rows.sort(key=lambda r: str(r["model"]).lower())
    args.result.record = {"budget_bytes": budget, "context": args.context, "models": rows}
    if not rows:
        print("no models in the Hub's cache; outcore generate --model owner/name fetches one")
        return
    _show(rows)
    print(
        f"Here: with a budget of {format_size(budget)}{'' if args.memory else ', what would be used without --memory'}."
    )


def _broken(warnings: Sequence[Exception]) -> Iterator[dict[str, Any]]:
    for warning in warnings:
        said = one_line(warning)
        # It names the folder, and nothing else does: models--owner--name.
        _, there, rest = said.partition("models--")
        if there:
            name = rest.split("/")[0].split(" ")[0].rstrip(".,:)'\"").replace("--", "/")
            yield _refused(name, 0, f"not whole in the Hub's cache: {said.partition(': ')[0]}")


def _row(repo: CachedRepoInfo, context: int | None, budget: int) -> dict[str, Any]:
    name, nbytes = repo.repo_id, repo.size_on_disk
    if not repo.revisions:
        return _refused(name, nbytes, "nothing of it was fetched")
    # What ``--model`` would open: the main branch, or what was fetched last.
    folder = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified)).snapshot_path
    try:
        with redirect_stdout(sys.stderr):  # what mlx-lm has to say
            prepared = prepare(folder, memory=f"{budget}B", context=context, least=True)
    except OutcoreError as e:
        # Where is known: what stands before the reason is the folder.
        return _refused(name, nbytes, one_line(e).removeprefix(f"{folder}: ").replace(f"{folder}/", ""))
    except Exception as e:  # a model's own configuration, in mlx-lm's hands: it raises what it likes
        return _refused(name, nbytes, f"mlx-lm cannot open it: {one_line(e)}")
    smallest, resident = prepared.plan.smallest_budget_bytes, resident_budget(prepared.profile.size)
    row = {
        "model": name,
        "folder": str(folder),
        "model_type": prepared.profile.lazy.config.get("model_type"),
        "disk_bytes": nbytes,
        "weight_bytes": prepared.profile.lazy.checkpoint.nbytes,
        "context": prepared.profile.size.context,
        "smallest_budget_bytes": smallest,
        "resident_budget_bytes": resident,
        "here": "all resident" if resident <= budget else "streams" if smallest <= budget else "does not fit",
        "reason": None,
    }
    del prepared
    gc.collect()  # modules may be in cycles
    return row


def _refused(name: str, nbytes: int, why: str) -> dict[str, Any]:
    return {"model": name, "disk_bytes": nbytes, "here": None, "reason": shortened(why, REASON)}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    for r in rows:
        sizes = (r.get(name) for name in ("smallest_budget_bytes", "resident_budget_bytes"))
        shown = ("-" if size is None else format_size(size, round_up=True) for size in sizes)
        lines.append([r["model"], format_size(r["disk_bytes"]), *shown, r["here"] or r["reason"]])
    heads = ["~model", ">on disk", ">smallest budget", ">all resident from", "~here"]
    console(max(len(r["model"]) for r in rows) + REASON + 60, soft_wrap=False).print(table(heads, lines))
