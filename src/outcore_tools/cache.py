"""``outcore cache``: what copies, drafts, calibrations, kernels, prompts and conversations take; removing them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence

from outcore.checks import choice
from outcore.cli.console import console, table
from outcore.cli.output import tell
from outcore.errors import OutcoreError, UsageError
from outcore.machine.cache_folder import cache_dir
from outcore.sizes import format_size
from outcore.text import counted, shortened

from .cache_contents import CONVERSATION, Entry, contents
from .flags import ACTIONS

_AGES = (("d", 86_400), ("h", 3600), ("min", 60))


def run(args: argparse.Namespace) -> int:
    """Run the command; its exit status, 1 where something could not be removed."""
    if choice("ACTION", args.action, ACTIONS) == "rm" and not args.names:
        raise UsageError("rm: give a NAME; outcore cache ls shows what there is")
    if args.action != "rm" and args.names:
        raise UsageError(f"{args.action} takes no NAME: {shortened(args.names[0])}")
    found = contents()
    if args.action == "ls":
        _list(args, found)
        return 0
    if args.action == "rm":
        chosen = list(dict.fromkeys(_named(name, found) for name in args.names))
    else:
        chosen = [e for e in found if e.kind != CONVERSATION]
        if kept := len(found) - len(chosen):
            tell(f"outcore cache: {counted(kept, 'conversation')} of chat --session stay; remove them by name (rm)")
        if chosen and not args.force and not _agreed(chosen):
            tell("outcore cache: nothing was removed")
            return 1
    removed: list[Entry] = []
    refused: dict[str, str] = {}
    for entry in chosen:
        try:
            entry.remove()
            removed.append(entry)
        except FileNotFoundError:
            removed.append(entry)  # by somebody else
        except (OSError, OutcoreError) as e:
            refused[entry.name] = f"cannot be removed: {e.strerror or e}" if isinstance(e, OSError) else str(e)
    for name, why in refused.items():
        tell(f"outcore cache: {name}: {why}")
    nbytes = sum(e.nbytes for e in removed)
    args.result.record = {"removed": [e.name for e in removed], "bytes": nbytes, "refused": refused}
    print(f"removed {len(removed)} of {len(chosen)}, {format_size(nbytes)}")
    return 1 if refused else 0


def _named(name: str, found: Sequence[Entry]) -> Entry:
    """What has that name, or alone begins so."""
    same = [e for e in found if e.name == name] or [e for e in found if name and e.name.startswith(name)]
    if len(same) == 1:
        return same[0]
    if same:
        few = ", ".join(e.name for e in same[:3])
        raise UsageError(f"{shortened(name)}: {len(same)} names begin so ({few}{', ...' * (len(same) > 3)}): give more")
    raise UsageError(f"{shortened(name)}: there is nothing of that name; outcore cache ls shows what there is")


def _agreed(chosen: Sequence[Entry]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clear asks first, and standard input is no terminal: give --force")
    what = f"{counted(len(chosen), 'thing')}, {format_size(sum(e.nbytes for e in chosen))}"
    print(f"Remove all of it, {what}, from {cache_dir()}? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _list(args: argparse.Namespace, found: Sequence[Entry]) -> None:
    now, total = time.time(), sum(e.nbytes for e in found)
    args.result.record = {
        "folder": str(cache_dir()),
        "bytes": total,
        "entries": [
            {
                "name": e.name,
                "kind": e.kind,
                "coding": e.coding,
                "model": e.model,
                "bytes": e.nbytes,
                "age_s": round(max(0.0, now - e.used), 1),
                "state": e.state,
            }
            for e in found
        ],
    }
    if not found:
        print(f"nothing in {cache_dir()}")
        return
    rows = []
    for e in found:
        kind = f"{e.kind}, {e.coding}" if e.coding else e.kind
        rows.append([e.name, kind, e.model or "-", format_size(e.nbytes), _age(now - e.used), e.state or ""])
    # Names are there to be copied: where nobody looks, they are not broken over lines.
    out = console(max(len(e.name) + len(e.model or "") for e in found) + 90, soft_wrap=False)
    out.print(table(["~name", "~kind", "~model", ">size", ">used", ""], rows))
    print(f"{counted(len(found), 'thing')}, {format_size(total)} in {cache_dir()}")


def _age(seconds: float) -> str:
    return next((f"{int(seconds // length)} {unit} ago" for unit, length in _AGES if seconds >= length), "now")
