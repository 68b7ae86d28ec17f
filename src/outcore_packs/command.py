"""``outcore pack``: copies a model into the aligned layout that reads fastest."""

from __future__ import annotations

import argparse
import time

from outcore.checkpoint.find_model import resolve_model
from outcore.checkpoint.manifest import CODING, COMPACT, PLAIN, PLANES
from outcore.cli.engine import ProgressBar
from outcore.cli.flags import text_of
from outcore.decode.opening import options_for
from outcore.decode.preparation import prepare
from outcore.decode.speculative.sources import draft_source, parse_draft
from outcore.errors import UsageError
from outcore.machine.device import on_cpu
from outcore.options import LoadOptions
from outcore.sizes import format_size
from outcore.text import printable, shortened

from .full_copy import pack_model


def run(args: argparse.Namespace) -> None:
    began = time.perf_counter()
    coding = args.coding if args.coding != "auto" else PLAIN if on_cpu() else COMPACT
    cut = coding.startswith(PLANES)
    draft = _drafted_by(coding) if cut else None
    if not CODING.fullmatch(coding) or (cut and draft is None):
        raise UsageError(
            f"--coding {shortened(coding)}: choose auto, plain, compact, or {PLANES}:BITS such as {PLANES}:2"
        )
    if args.output is not None:
        text_of("--output", str(args.output))  # MLX can only open names that are valid text
    folder, trust = resolve_model(args.model, args.revision), {"trust_remote_code": args.trust_remote_code}
    options_for(folder, LoadOptions())  # refuses a drafter
    written = set[str]()
    with ProgressBar() as bar:

        def progress(what: str, done: int, total: int) -> None:
            written.add(what)
            bar(what, done, total)

        store = pack_model(folder, args.output, force=args.force, coding=coding, progress=progress, **trust)
        if draft is not None:
            found = prepare(store.folder, draft=draft, **trust)
            assert found.planning.draft is not None
            draft, kind = found.planning.draft.name, found.planning.draft.kind
            draft_source(kind).write(found.profile, found.planning.draft, bar)
    seconds = time.perf_counter() - began
    nbytes = sum(t.nbytes for t in store.tensors.values())
    how = "in fewer bytes" if coding == COMPACT else "cut in two"
    coded = f" ({len(store.manifest.codings)} {how})" if store.manifest.codings else ""
    drafts = "" if draft is None else f"; --draft {draft} has its draft there"
    how = f"{seconds:.1f} s" if written else "already there; --force writes it again"
    made = f"{len(store.tensors)} tensors{coded}, {format_size(nbytes)}, {how}{drafts}"
    print(f"{printable(str(store.folder))}: {made}")
    args.result.record = {
        "folder": str(store.folder),
        "tensors": len(store.tensors),
        "bytes": nbytes,
        "seconds": seconds,
        "coding": store.manifest.coding,
        "coded_tensors": len(store.manifest.codings),
    }


def _drafted_by(coding: str) -> str | None:
    """Returns the ``--draft`` value that drafts with the coding's high bits; None: no draft has so many bits."""
    draft = f"self:{coding.removeprefix(f'{PLANES}:')}"
    try:
        parse_draft(draft)
    except UsageError:
        return None
    return draft
