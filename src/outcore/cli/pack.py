"""``outcore pack``: copy a model into the aligned layout that reads fastest."""

from __future__ import annotations

import argparse
import time

from ..checkpoint.codings import codings
from ..checkpoint.find_model import resolve_model
from ..checkpoint.manifest import CODING, COMPACT, PLAIN, PLANES
from ..decode.preparation import prepare
from ..decode.speculative.drafting import parse_draft
from ..decode.speculative.self_draft import BITS, make_self_draft, self_draft
from ..errors import UsageError
from ..machine.device import on_cpu
from ..plan.draft_cost import NONE, SELF
from ..sizes import format_size
from ..text import printable, shortened
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
    coding = args.coding if args.coding != "auto" else PLAIN if on_cpu() else COMPACT
    planes = {f"{PLANES}:{high}": high for high in BITS}  # of other bits there are planes, but no draft
    if not CODING.fullmatch(coding) or (coding.startswith(PLANES) and coding not in planes):
        raise UsageError(
            f"--coding {shortened(coding)}: choose auto, plain, compact, or {PLANES}:BITS such as {PLANES}:2"
        )
    if coding in planes and bits not in (None, planes[coding]):
        raise UsageError(f"--draft {args.draft}: drafts with other bits than --coding {coding} keeps apart")
    bits = planes.get(coding, bits)
    if args.output is not None:
        text_of("--output", str(args.output))  # MLX opens no file by another name
    folder, trust = resolve_model(args.model, args.revision), {"trust_remote_code": args.trust_remote_code}
    if (packs := codings()) is None:
        raise UsageError("pack: needs the package outcore_packs, which is not there; install outcore whole")
    with progress_bar() as bar:
        store = packs.pack_model(folder, args.output, force=args.force, coding=coding, progress=bar, **trust)
        if isinstance(bits, int):
            found = prepare(store.folder, draft=f"{SELF}:{bits}", **trust).profile
            make_self_draft(found, self_draft(found, bits), bar)
    seconds = time.perf_counter() - began
    nbytes = sum(t.nbytes for t in store.tensors.values())
    how = "in fewer bytes" if coding == COMPACT else "cut in two"
    coded = f" ({len(store.manifest.codings)} {how})" if store.manifest.codings else ""
    drafts = "" if bits is None else f"; --draft {SELF}:{bits} has its draft there"
    made = f"{len(store.tensors)} tensors{coded}, {format_size(nbytes)}, {seconds:.1f} s{drafts}"
    print(f"{printable(str(store.folder))}: {made}")
    args.result.record = {
        "folder": str(store.folder),
        "tensors": len(store.tensors),
        "bytes": nbytes,
        "seconds": seconds,
        "coding": store.manifest.coding,
        "coded_tensors": len(store.manifest.codings),
    }
