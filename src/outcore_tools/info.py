"""``outcore info`` and ``outcore list``: sizes and plans of models, without loading them."""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from huggingface_hub import CachedRepoInfo, CacheNotFound, constants, scan_cache_dir

from outcore.checkpoint.checkpoint import CONFIG
from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.manifest import PLAIN
from outcore.checkpoint.packed_store import missing_bytes
from outcore.checks import whole
from outcore.cli.console import console, listing, table
from outcore.cli.flags import loading_options
from outcore.cli.plan import counted_by, facts, held
from outcore.decode.budget import asked_budget
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import BudgetError, OutcoreError
from outcore.machine.settings import short_names
from outcore.plan.joint_plan import AUTO, NONE
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size
from outcore.text import counted, one_line, shortened


def run(args: argparse.Namespace) -> None:
    folder = resolve_model(args.model, args.revision)
    prepared = prepare(folder, **loading_options(args), least=True)
    args.result.record = describe(prepared)
    _show(args.result.record, prepared)
    if prepared.refused:
        raise BudgetError(prepared.refused)


def describe(prepared: Preparation) -> dict[str, Any]:
    profile, plan = prepared.profile, prepared.plan
    size = profile.size
    dtypes: Counter[str] = Counter()
    for tensor in profile.lazy.checkpoint.tensors.values():
        dtypes[tensor.dtype] += tensor.nbytes
    quantization = profile.lazy.config.get("quantization")
    layers, step = sum(layer.resident for layer in size.layers), prepared.planning.options.get("prefill_step")
    return facts(plan) | {
        "model": str(profile.lazy.checkpoint.folder),
        "model_type": profile.lazy.config.get("model_type"),
        "quantization": {k: v for k, v in quantization.items() if not isinstance(v, dict)} if quantization else None,
        "coding": profile.lazy.coding,
        "checkpoint_bytes": profile.lazy.checkpoint.nbytes,
        "bytes_by_dtype": dict(dtypes),
        "layers": len(size.layers),
        "streamable_layers": sum(layer.streamable for layer in size.layers),
        "layer_bytes": sorted({layer.resident for layer in size.layers}),
        "layers_bytes": layers,
        "non_layer_bytes": size.non_layer,
        "weight_bytes": layers + size.non_layer,
        "context": size.context,
        "prompt": size.prompt,
        "draft": prepared.draft.name if prepared.draft is not None else None,
        "context_bytes": plan.cache_bytes,
        "to_pack_bytes": missing_bytes(profile.lazy, profile.layers),
        "resident_budget_bytes": resident_budget(prepared.planning.largest, step),
        "resident_units": list(plan.resident),
        "streamed_units": list(plan.streamed),
        "by_row_bytes": size.tables,
        "row_bytes_per_token": size.row_bytes,
        "head_bytes": size.head.resident if size.head is not None else 0,
        "experts_per_layer": [layer.experts.count if layer.experts is not None else 0 for layer in size.layers],
        "expert_slots": [dict(plan.pools).get(i, 0) for i in range(len(size.layers))],
        "peak_bytes": plan.peak_bytes,
        "notes": list(prepared.notes),
    }


def _between(numbers: Iterable[int], say: Any = str) -> str:
    """Formats the smallest and the largest number, as in ``3 to 5``."""
    ordered = sorted(set(numbers))
    return " to ".join(dict.fromkeys(say(n) for n in (ordered[:1] + ordered[-1:]))) or "-"


def _show(r: dict[str, Any], prepared: Preparation) -> None:
    quantization, plan, (per, images) = r["quantization"] or {}, prepared.plan, counted_by(prepared)
    kind = ", ".join(f"{k} {v}" for k, v in quantization.items()) or "none"
    dtypes = ", ".join(f"{name} {format_size(n)}" for name, n in sorted(r["bytes_by_dtype"].items()))
    experts = [e for layer in prepared.profile.size.layers if (e := layer.experts) is not None]
    each = f"{_between(e.count for e in experts)} of {_between((e.resident for e in experts), format_size)}"
    used = f"a token uses {_between(e.used for e in experts)}"
    # The smallest budget is for this context; ``generate`` plans for its own prompt and answer.
    tokens = f"{counted(r['context'], 'token')} (--context)"
    if r["prompt"] < r["context"]:
        tokens += f", {r['prompt']} of them prompt (--prompt-tokens)"
    # With --draft auto, the smallest budget has no room for drafts.
    if prepared.planning.kind not in (AUTO, NONE):
        tokens += f", with drafts by {r['draft']} (--draft)"
    rows = [
        ("model", f"{r['model']} ({r['model_type']}{', ' * bool(images)}{images})"),
        ("quantization", kind),
        ("packed with", f"--coding {r['coding']}" if r["coding"] != PLAIN else ""),
        ("on disk", f"{format_size(r['checkpoint_bytes'])} ({dtypes})"),
        ("layers", f"{r['layers']} of {_between(r['layer_bytes'], format_size)}, "
                   f"{format_size(r['layers_bytes'])} together"),
        ("not layers", format_size(r["non_layer_bytes"])),
        ("tables", f"{format_size(r['by_row_bytes'])} read by row, {format_size(r['row_bytes_per_token'])} a token"
                   if r["by_row_bytes"] else ""),
        ("experts", f"{each} in each of {counted(len(experts), 'layer')}, {used}" if experts else ""),
        ("context", f"{format_size(r['context_bytes'])} for {counted(r['context'], 'token')}"),
        ("all resident from", format_size(r["resident_budget_bytes"], round_up=True)),
        ("smallest budget", f"{format_size(r['smallest_budget_bytes'], round_up=True)} for a context of {tokens}"),
    ]  # fmt: skip
    out = console()
    out.print(listing([row for row in rows if row[1]]))
    if prepared.refused is not None:
        return
    out.print(f"With {format_size(plan.budget_bytes)}: {held(plan, per)}; peak {format_size(plan.peak_bytes)}.")
    if plan.streamed and r["to_pack_bytes"]:
        out.print(f"First use packs {format_size(r['to_pack_bytes'])} that the model uses in another layout.")
    for note in r["notes"]:
        out.print(f"Note: {note}")


REASON = 90


def list_models(args: argparse.Namespace) -> None:
    if args.context is not None:
        whole("--context", args.context)
    budget = asked_budget(args.memory)
    rows: list[dict[str, Any]] = []
    try:
        info = scan_cache_dir(constants.HF_HUB_CACHE)
        rows += [_of_hub(r, args.context, budget) for r in info.repos if r.repo_type == "model"]
        rows += _broken(info.warnings)
    except (CacheNotFound, ValueError):  # no such folder, or a file
        pass
    rows += [_row(name, folder, args.context, budget) for name, folder in _named_folders()]
    rows.sort(key=lambda r: str(r["model"]).lower())
    args.result.record = {"budget_bytes": budget, "context": args.context, "models": rows}
    if not rows:
        print("no models in the Hub's cache; outcore pull owner/name downloads one")
        return
    _show_models(rows)
    print(f"here: with --memory {format_size(budget)}{'' if args.memory else ' (the default)'}")


def _broken(warnings: Sequence[Exception]) -> Iterator[dict[str, Any]]:
    for warning in warnings:
        text = one_line(warning)
        # The model's name stands only in the text, as the folder models--owner--name.
        _, found, rest = text.partition("models--")
        if found:
            name = rest.split("/")[0].split(" ")[0].rstrip(".,:)'\"").replace("--", "/")
            yield _refused(name, 0, f"incomplete in the Hub's cache: {text.partition(': ')[0]}")


def _named_folders() -> Iterator[tuple[str, Path]]:
    """Yields the models in folders that have a short name: the folder itself, or those in it."""
    for name, value in short_names().items():
        folder = Path(value).expanduser()
        inside = [] if (folder / CONFIG).exists() else sorted(folder.glob(f"*/{CONFIG}"))
        yield from ((str(path.parent), path.parent) for path in inside)
        if folder.is_dir() and not inside:
            yield name, folder


def _of_hub(repo: CachedRepoInfo, context: int | None, budget: int) -> dict[str, Any]:
    if not repo.revisions:
        return _refused(repo.repo_id, repo.size_on_disk, "nothing downloaded")
    # As ``--model`` does: the main branch, or the newest download.
    folder = max(repo.revisions, key=lambda r: ("main" in r.refs, r.last_modified)).snapshot_path
    return _row(repo.repo_id, folder, context, budget, repo.size_on_disk)


def _row(name: str, folder: Path, context: int | None, budget: int, nbytes: int | None = None) -> dict[str, Any]:
    nbytes = sum(file.stat().st_size for file in folder.glob("*") if file.is_file()) if nbytes is None else nbytes
    try:
        with redirect_stdout(sys.stderr):  # mlx-lm prints warnings
            prepared = prepare(folder, memory=f"{budget}B", context=context, least=True)
    except OutcoreError as e:
        # The table names the model already, so the folder is removed from the error.
        return _refused(name, nbytes, one_line(e).removeprefix(f"{folder}: ").replace(f"{folder}/", ""))
    except Exception as e:  # mlx-lm may raise anything for a model's configuration
        return _refused(name, nbytes, f"mlx-lm cannot open it: {one_line(e)}")
    smallest, step = prepared.plan.smallest_budget_bytes, prepared.planning.options.get("prefill_step")
    resident = resident_budget(prepared.profile.size, step)
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


def _show_models(rows: Sequence[dict[str, Any]]) -> None:
    lines = []
    for r in rows:
        sizes = (r.get(name) for name in ("smallest_budget_bytes", "resident_budget_bytes"))
        shown = ("-" if size is None else format_size(size, round_up=True) for size in sizes)
        lines.append([r["model"], format_size(r["disk_bytes"]), *shown, r["here"] or r["reason"]])
    heads = ["~model", ">on disk", ">smallest budget", ">all resident from", "~here"]
    console(max(len(r["model"]) for r in rows) + REASON + 60, soft_wrap=False).print(table(heads, lines))
