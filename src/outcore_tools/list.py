"""``outcore list``: lists the models in the Hub's cache and the memory that each needs. Reads headers only."""

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


def run(args: argparse.Namespace) -> None:
    if args.context is not None:
        whole("--context", args.context)
    budget = asked_budget(args.memory)
    rows: list[dict[str, Any]] = []
    try:
        info = scan_cache_dir(args.cache_dir)
        rows += [_row(r, args.context, budget) for r in info.repos if r.repo_type == "model"]
        rows += _broken(info.warnings)
    except (CacheNotFound, ValueError):  # no such folder, or a file
        pass
    rows.sort(key=lambda r: str(r["model"]).lower())
    args.result.record = {"budget_bytes": budget, "context": args.context, "models": rows}
    if not rows:
        print("no models in the Hub's cache; outcore generate --model owner/name downloads one")
        return
    _show(rows)
    print(f"here: with --memory {format_size(budget)}{'' if args.memory else ' (the default)'}")


def _broken(warnings: Sequence[Exception]) -> Iterator[dict[str, Any]]:
    for warning in warnings:
        text = one_line(warning)
        # The model's name stands only in the text, as the folder models--owner--name.
        _, found, rest = text.partition("models--")
        if found:
            name = rest.split("/")[0].split(" ")[0].rstrip(".,:)'\"").replace("--", "/")
            yield _refused(name, 0, f"incomplete in the Hub's cache: {text.partition(': ')[0]}")


def _row(repo: CachedRepoInfo, context: int | None, budget: int) -> dict[str, Any]:
    name, nbytes = repo.repo_id, repo.size_on_disk
    if not repo.revisions:
        return _refused(name, nbytes, "nothing downloaded")
    # As ``--model`` does: the main branch, or the newest download.
    folder = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified)).snapshot_path
    try:
        with redirect_stdout(sys.stderr):  # mlx-lm prints warnings
            prepared = prepare(folder, memory=f"{budget}B", context=context, least=True)
    except OutcoreError as e:
        # The table names the model already, so the folder is removed from the error.
        return _refused(name, nbytes, one_line(e).removeprefix(f"{folder}: ").replace(f"{folder}/", ""))
    except Exception as e:  # mlx-lm may raise anything for a model's configuration
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
    gc.collect()  # modules may form reference cycles
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
