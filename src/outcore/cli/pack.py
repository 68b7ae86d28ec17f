"""``outcore pack``: copy a model into the aligned layout that reads fastest."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from ..errors import UsageError
from ..generation.speculative.drafting import parse_draft
from ..generation.speculative.self_draft import make_self_draft, self_draft
from ..loading.preparation import prepare
from ..model.checkpoint import resolve_model
from ..model.pack import pack_model
from ..planning.draft_cost import NONE, SELF
from ..sizes import format_size
from .engine import progress_bar, text_of
from .parser import Parser


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="outcore pack",
        description="Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where "
        "it was. Without --output it goes to the cache and is used whenever that model is loaded.",
    )
    parser.add_argument("model", help="A local folder, or a model of the Hugging Face Hub.")
    parser.add_argument("--output", "-o", type=Path, help="A folder that can then be given as --model.")
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub.")
    parser.add_argument("--force", action="store_true", help="Pack again, even where a copy is there.")
    parser.add_argument(
        "--draft",
        metavar="self:BITS",
        help="Make the low-bit copy too that drafts for the model with --draft self:BITS; else it is made when first "
        "asked for.",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="Run code that comes with the model.")
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args(argv)
    began = time.perf_counter()
    kind, bits = parse_draft(args.draft or NONE)
    if kind not in (NONE, SELF):
        raise UsageError(f"--draft {args.draft}: only a copy of the model itself is made here, such as self:3")
    if args.draft is not None and kind == NONE:
        raise UsageError(f"--draft {args.draft}: nothing would be made; leave it out, or give {SELF}:3")
    if args.output is not None:
        text_of("--output", str(args.output))  # MLX opens no file by another name
    with progress_bar() as bar:
        store = pack_model(
            resolve_model(args.model, args.revision),
            args.output,
            force=args.force,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
        )
        if isinstance(bits, int):
            found = prepare(store.folder, trust_remote_code=args.trust_remote_code, draft=f"{SELF}:{bits}").survey
            make_self_draft(found, self_draft(found, bits), bar)
    seconds = time.perf_counter() - began
    nbytes = sum(t.nbytes for t in store.tensors.values())
    print(f"{store.folder}: {len(store.tensors)} tensors, {format_size(nbytes)}, {seconds:.1f} s")
    if args.json:
        record = {"folder": str(store.folder), "tensors": len(store.tensors), "bytes": nbytes, "seconds": seconds}
        print(json.dumps(record))
