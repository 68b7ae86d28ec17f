"""``outcore pack --ranks``: a folder for each of several machines, with what that one needs."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.manifest import PLAIN
from outcore.cli import pack
from outcore.cli.arguments import text_of
from outcore.cli.engine import progress_bar
from outcore.errors import UsageError
from outcore.sizes import format_size
from outcore.text import counted, printable

from ..folders import RankShares, pack_ranks


def run(args: argparse.Namespace) -> None:
    """Run the command, for ranks or as it is without them."""
    if args.ranks_wanted is None:
        pack.run(args)
        return
    began = time.perf_counter()
    how = RankShares.parsed(args.ranks_wanted.removesuffix(":blocks"), blocks=args.ranks_wanted.endswith(":blocks"))
    if args.output is None:
        raise UsageError("--ranks: give a folder for the ranks' folders: --output")
    text_of("--output", str(args.output))  # MLX opens no file by another name
    if args.draft is not None or (pack.coding_of(args.coding) != PLAIN and args.coding != "auto"):
        raise UsageError(f"--{'draft' if args.draft is not None else 'coding'}: not with --ranks yet; leave it out")
    rows: list[dict[str, Any]] = []
    with progress_bar() as bar:
        for store in pack_ranks(
            resolve_model(args.model, args.revision),
            args.output,
            how,
            force=args.force,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
        ):
            assert store.share is not None  # it was asked for
            layers, nbytes = store.share.owners.count(store.share.rank), sum(f.stat().st_size for f in store.files)
            rows.append({"folder": str(store.folder), "layers": layers, "bytes": nbytes})
    for row in rows:
        print(f"{printable(row['folder'])}: {counted(row['layers'], 'layer')}, {format_size(row['bytes'])}")
    seconds = time.perf_counter() - began
    folder = shlex.quote(printable(str(args.output)))
    print(
        f"Copy each to its host, to the same path, and give outcore launch's command --model {folder}; {seconds:.1f} s"
    )
    args.result.record = {"ranks": rows, "seconds": seconds}
