"""``outcore convert``: ``mlx_lm.convert`` in bounded memory."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict, fields
from pathlib import Path

from outcore.checkpoint.checkpoint import CONFIG
from outcore.checkpoint.find_model import local_folder, resolve_model
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import text_of
from outcore.decode.budget import asked_budget
from outcore.errors import UsageError
from outcore.machine.allocator import peak_held
from outcore.machine.memory import peak_rss
from outcore.machine.settings import short_names
from outcore.sizes import format_size
from outcore.text import counted, printable
from outcore_drafters.config import config_of, is_drafter

from .convert import convert
from .recipe import Settings


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    if args.quantize and args.dequantize:
        raise UsageError("--quantize and --dequantize: give one of them")
    if args.quant_predicate is not None and args.q_mode != "affine":
        raise UsageError(f"--quant-predicate {args.quant_predicate}: needs --q-mode affine")
    output, budget = Path(text_of("--output", str(args.output))).expanduser(), asked_budget(args.memory)
    if not output.name:
        raise UsageError("--output '': give a new folder")
    folder, name = resolve_model(args.model, args.revision), short_names().get(args.model, args.model)
    if (folder / CONFIG).exists() and is_drafter(config_of(folder)):
        raise UsageError(f"{printable(str(folder))}: a drafter, not a model; --draft-bits quantizes it as it loads")
    settings = Settings(**{each.name: getattr(args, each.name) for each in fields(Settings)})
    hub_name = None if local_folder(name) is not None else name
    with ProgressBar() as bar:
        made = convert(folder, output, settings, budget, hub_name=hub_name, progress=bar)
    seconds = time.perf_counter() - began
    kept = f" ({format_size(made.kept_bytes)} were there)" if made.kept_bytes else ""
    size = f"{counted(made.files, 'file')}, {format_size(made.bytes)}{kept}, {made.bits_per_weight:.3f} bits per weight"
    print(f"{printable(str(output))}: {size}, {seconds:.1f} s")
    args.result.record = {
        "folder": str(output),
        **asdict(made),
        "seconds": round(seconds, 3),
        "peak_memory_bytes": peak_held(),
        "peak_rss_bytes": peak_rss(),
        "budget_bytes": budget,
    }
