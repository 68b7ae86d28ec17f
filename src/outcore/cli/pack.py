"""``outcore pack``: copy a model into the aligned layout that reads fastest."""

from __future__ import annotations

import argparse
import shlex
import time
from typing import Any

from outcore_cluster.folders import RankShares, pack_ranks

from ..checkpoint.find_model import resolve_model
from ..checkpoint.manifest import CODING, COMPACT, PLAIN, PLANES
from ..checkpoint.pack import pack_model
from ..decode.speculative.drafting import parse_draft
from ..decode.speculative.self_draft import BITS, make_self_draft, self_draft
from ..errors import UsageError
from ..loading.preparation import prepare
from ..machine.device import on_cpu
from ..plan.draft_cost import NONE, SELF
from ..sizes import format_size
from ..text import counted, printable, shortened
from .arguments import text_of
from .engine import progress_bar


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    began = time.perf_counter()
    kind, bits = parse_draft(args.draft or NONE)
    if kind not in (NONE, SELF):
        raise UsageError(f"--draft {args.draft}: only a copy of the model itself is made here, such as self:3")
    if args.draft is not None and kind == NONE:
        raise UsageError(f"--draft {args.draft}: nothing would be made; leave it out, or give {SELF}:3")
    coding = _coding(args.coding)
    if coding.startswith(PLANES):
        high = int(coding.removeprefix(f"{PLANES}:"))
        if bits not in (None, high):
            raise UsageError(f"--draft {args.draft}: drafts with other bits than --coding {coding} keeps apart")
        bits = high
    if args.output is not None:
        text_of("--output", str(args.output))  # MLX opens no file by another name
    if args.ranks_wanted is not None:
        _for_ranks(args, began)
        return
    if args.blocks:
        raise UsageError("--blocks: is about --ranks; give both")
    with progress_bar() as bar:
        store = pack_model(
            resolve_model(args.model, args.revision),
            args.output,
            force=args.force,
            coding=coding,
            trust_remote_code=args.trust_remote_code,
            progress=bar,
        )
        if isinstance(bits, int):
            found = prepare(store.folder, trust_remote_code=args.trust_remote_code, draft=f"{SELF}:{bits}").profile
            make_self_draft(found, self_draft(found, bits), bar)
    seconds = time.perf_counter() - began
    nbytes = sum(t.nbytes for t in store.tensors.values())
    how = "in fewer bytes" if coding == COMPACT else "cut in two"
    coded = f" ({len(store.codings)} {how})" if store.codings else ""
    drafts = "" if bits is None else f"; --draft {SELF}:{bits} has its draft there"
    print(
        f"{printable(str(store.folder))}: {len(store.tensors)} tensors{coded}, {format_size(nbytes)}, {seconds:.1f} s"
        + drafts
    )
    args.result.record = {
        "folder": str(store.folder),
        "tensors": len(store.tensors),
        "bytes": nbytes,
        "seconds": seconds,
        "coding": store.coding,
        "coded_tensors": len(store.codings),
    }


def _for_ranks(args: argparse.Namespace, began: float) -> None:
    how = RankShares.parsed(args.ranks_wanted, blocks=args.blocks)
    if args.output is None:
        raise UsageError("--ranks: give a folder for the ranks' folders: --output")
    if args.draft is not None or (_coding(args.coding) != PLAIN and args.coding != "auto"):
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


def _coding(asked: str) -> str:
    if asked == "auto":
        return PLAIN if on_cpu() else COMPACT
    planes = [f"{PLANES}:{bits}" for bits in BITS]  # of other bits there are planes, but no draft
    if not CODING.fullmatch(asked) or (asked.startswith(PLANES) and asked not in planes):
        raise UsageError(
            f"--coding {shortened(asked)}: choose auto, plain, compact, or {PLANES}:BITS such as {PLANES}:2"
        )
    return asked
