"""``outcore pack``: copy a model into the aligned layout that reads fastest."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ..checkpoint import resolve_model
from ..pack import pack_model
from ..sizes import format_size
from .engine import progress_bar


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = argparse.ArgumentParser(
        prog="outcore pack",
        description="Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where "
        "it was. Without --output it goes to the cache and is used whenever that model is loaded.",
    )
    parser.add_argument("model", help="A local folder, or a model of the Hugging Face Hub.")
    parser.add_argument("--output", "-o", type=Path, help="A folder that can then be given as --model.")
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub.")
    parser.add_argument("--force", action="store_true", help="Pack again, even where a copy is there.")
    parser.add_argument("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args(argv)
    began = time.perf_counter()
    with progress_bar() as bar:
        store = pack_model(
            resolve_model(args.model, args.revision),
            args.output,
            force=args.force,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
        )
    seconds = time.perf_counter() - began
    nbytes = sum(t.nbytes for t in store.tensors.values())
    print(f"{store.folder}: {len(store.tensors)} tensors, {format_size(nbytes)}, {seconds:.1f} s")
    if args.json:
        record = {"folder": str(store.folder), "tensors": len(store.tensors), "bytes": nbytes, "seconds": seconds}
        print(json.dumps(record))
