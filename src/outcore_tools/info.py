"""``outcore info``: shows a model's sizes and plan without loading it."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable
from typing import Any

from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.manifest import PLAIN
from outcore.checkpoint.packed_store import missing_bytes
from outcore.cli.arguments import loading_options
from outcore.cli.console import console, listing
from outcore.cli.plan import facts, held
from outcore.decode.preparation import Preparation, prepare
from outcore.errors import BudgetError
from outcore.plan.joint_plan import AUTO, NONE
from outcore.plan.planner import resident_budget
from outcore.sizes import format_size
from outcore.text import counted


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
    layers = sum(layer.resident for layer in size.layers)
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
        "resident_budget_bytes": resident_budget(prepared.planning.largest),
        "resident_units": list(plan.resident),
        "streamed_units": list(plan.streamed),
        "by_row_bytes": size.tables,
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
    quantization, plan = r["quantization"] or {}, prepared.plan
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
        ("model", f"{r['model']} ({r['model_type']})"),
        ("quantization", kind),
        ("packed with", f"--coding {r['coding']}" if r["coding"] != PLAIN else ""),
        ("on disk", f"{format_size(r['checkpoint_bytes'])} ({dtypes})"),
        ("layers", f"{r['layers']} of {_between(r['layer_bytes'], format_size)}, "
                   f"{format_size(r['layers_bytes'])} together"),
        ("not layers", format_size(r["non_layer_bytes"])),
        ("experts", f"{each} in each of {counted(len(experts), 'layer')}, {used}" if experts else ""),
        ("context", f"{format_size(r['context_bytes'])} for {counted(r['context'], 'token')}"),
        ("all resident from", format_size(r["resident_budget_bytes"], round_up=True)),
        ("smallest budget", f"{format_size(r['smallest_budget_bytes'], round_up=True)} for a context of {tokens}"),
    ]  # fmt: skip
    out = console()
    out.print(listing([row for row in rows if row[1]]))
    if prepared.refused is not None:
        return
    out.print(f"With {format_size(plan.budget_bytes)}: {held(plan)}; peak {format_size(plan.peak_bytes)}.")
    if plan.streamed and r["to_pack_bytes"]:
        out.print(f"First use packs {format_size(r['to_pack_bytes'])} that the model uses in another layout.")
    for note in r["notes"]:
        out.print(f"Note: {note}")
