"""``outcore cache``: lists and removes Outcore's own files in its cache folder."""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outcore.checks import choice
from outcore.cli.console import console, table
from outcore.cli.output import tell
from outcore.errors import OutcoreError, UsageError
from outcore.machine.cache_folder import REMOVED, SESSIONS, WRITER, InUseError, cache_dir, remove_folder, state
from outcore.machine.small_files import INDEX_BYTES, parse_json, read_small
from outcore.machine.written import FILE, add_up
from outcore.sizes import format_size
from outcore.text import counted, shortened

from .commands import ACTIONS

_AGES = (("d", 86_400), ("h", 3600), ("min", 60))


def run(args: argparse.Namespace) -> int:
    if choice("ACTION", args.action, ACTIONS) == "rm" and not args.names:
        raise UsageError("rm: give a NAME; outcore cache ls lists them")
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
            tell(f"outcore cache: keeping {counted(kept, 'conversation')} of chat --session; rm NAME removes one")
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
            removed.append(entry)  # another process removed it first
        except (OSError, OutcoreError) as e:
            refused[entry.name] = f"cannot be removed: {e.strerror or e}" if isinstance(e, OSError) else str(e)
    for name, why in refused.items():
        tell(f"outcore cache: {name}: {why}")
    nbytes = sum(e.nbytes for e in removed)
    args.result.record = {"removed": [e.name for e in removed], "bytes": nbytes, "refused": refused}
    print(f"removed {len(removed)} of {len(chosen)}, {format_size(nbytes)}")
    return 1 if refused else 0


def _named(name: str, found: Sequence[Entry]) -> Entry:
    same = [e for e in found if e.name == name] or [e for e in found if name and e.name.startswith(name)]
    if len(same) == 1:
        return same[0]
    if same:
        few = ", ".join(e.name for e in same[:3])
        raise UsageError(
            f"{shortened(name)}: {len(same)} names begin like this ({few}{', ...' * (len(same) > 3)}); give more of it"
        )
    raise UsageError(f"{shortened(name)}: no such item; outcore cache ls lists them")


def _agreed(chosen: Sequence[Entry]) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("clear needs a terminal to ask for confirmation; give --force to clear without asking")
    size = format_size(sum(e.nbytes for e in chosen))
    print(f"Clear {cache_dir()} ({counted(len(chosen), 'item')}, {size})? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _list(args: argparse.Namespace, found: Sequence[Entry]) -> None:
    now, total, (since, sums) = time.time(), sum(e.nbytes for e in found), written()
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
        "written": [{"what": what, "bytes": nbytes} for what, nbytes in sums.items()],
        "written_since": since,
    }
    if not found:
        print(f"nothing in {cache_dir()}")
        _tell_written(since, sums)
        return
    rows = []
    for e in found:
        kind = f"{e.kind}, {e.coding}" if e.coding else e.kind
        rows.append([e.name, kind, e.model or "-", format_size(e.nbytes), _age(now - e.used), e.state or ""])
    # Names must be easy to copy, so they do not wrap when the output is not a terminal.
    out = console(max(len(e.name) + len(e.model or "") for e in found) + 90, soft_wrap=False)
    out.print(table(["~name", "~kind", "~model", ">size", ">used", ""], rows))
    print(f"{counted(len(found), 'item')}, {format_size(total)} in {cache_dir()}")
    _tell_written(since, sums)


def written() -> tuple[float | None, dict[str, int]]:
    """Returns since when it is counted what Outcore writes to disks (None: nothing was), and the bytes by purpose."""
    add_up()
    since: float | None = None
    sums: dict[str, int] = {}
    with suppress(OSError):
        for line in (cache_dir() / FILE).read_text(encoding="utf-8", errors="replace").splitlines():
            if found := _WRITTEN.fullmatch(line):
                since = float(found[1]) if since is None else min(since, float(found[1]))
                sums[found[3]] = sums.get(found[3], 0) + int(found[2])
    return since, dict(sorted(sums.items()))


def _tell_written(since: float | None, sums: Mapping[str, int]) -> None:
    """Says what was written to disks, in the cache and elsewhere, whether it lies there still or not."""
    if since is not None:
        each = ", ".join(f"{what} {format_size(nbytes)}" for what, nbytes in sums.items())
        print(f"written since {time.strftime('%Y-%m-%d', time.localtime(since))}: {each}")


def _age(seconds: float) -> str:
    return next((f"{int(seconds // length)} {unit} ago" for unit, length in _AGES if seconds >= length), "now")


_WRITTEN = re.compile(r"(\d{1,12}) (\d{1,18}) ([a-z' ]{1,40})")
_COPY = re.compile(r"(overlay|full|draft)-(.+)-[0-9a-f]{16}-[0-9a-f]{8}")
_PROMPTS = re.compile(r"(.+)-[0-9a-f]{16}-[0-9a-f]{8}")
_MLX = re.compile(r"mlx-\d+\.\d+[\w.+]*-\S+")
_GOING = re.compile(rf"{REMOVED}\d+-(?:{_COPY.pattern}|{_MLX.pattern})")
_COPIES = {"overlay": "overlay", "full": "packed copy", "draft": "self draft"}
_MANIFEST = "manifest.json"
_CODING = re.compile(r"compact|planes:[1-7]")

KERNELS, REMAINS, PROMPTS, CONVERSATION = "kernels", "remains", "prompts", "conversation"

# Folders of single files: what each file is, and the pattern of its name. Earlier versions wrote ``runs`` and
# ``experts``.
FILES = {
    "calibration": ("calibration", r"[0-9a-f]{16}\.json"),
    "checked": ("first-use mark", r"[0-9a-f]{16}"),
    "mirrors": ("mirror, compared", r"[0-9a-f]{32}"),
    "experts": ("uses of experts", r"[0-9a-f]{16}\.json"),
    "runs": ("speeds of runs", r"[0-9a-f]{16}\.json"),
    "drafts-seen": ("what drafts gave", r"[0-9a-f]{16}\.json"),
    SESSIONS: (CONVERSATION, r"[\w.+-]+\.json"),
}


@dataclass(frozen=True)
class Entry:
    """A file or folder in the cache.

    Attributes:
        name: its unique name for ``outcore cache rm``.
        model: the model that it belongs to, if any.
        used: when it was last used or changed, in seconds since 1970.
        state: ``in use``, ``being written``, ``unfinished`` or None.
        coding: the ``--coding`` that a packed copy was made with, if any.
    """

    name: str
    kind: str
    path: Path
    model: str | None
    nbytes: int
    used: float
    state: str | None = None
    coding: str | None = None

    def remove(self) -> None:
        if self.kind == CONVERSATION:
            _remove_conversation(self.path)
        elif self.path.parent.name in FILES:
            # These files are read and replaced as a whole, so no process can be in the middle of one.
            self.path.unlink()
        elif self.kind in (REMAINS, PROMPTS):
            # A process that looks for a file there treats a missing one as not cached.
            shutil.rmtree(self.path)
        else:
            remove_folder(self.path)


def contents() -> list[Entry]:
    return sorted(_found(cache_dir()), key=lambda e: (-e.nbytes, e.name))


def _found(folder: Path) -> Iterator[Entry]:
    for path in _inside(folder):
        if not _is_folder(path):
            continue
        if match := _COPY.fullmatch(path.name):
            # Named after the Hub's folder models--owner--name, without the first part.
            how = state(path) or (None if (path / _MANIFEST).exists() else "unfinished")
            model, coding = match[2].replace("--", "/"), _coding(path / _MANIFEST)
            yield Entry(path.name, _COPIES[match[1]], path, model, *_weight(path), how, coding)
        elif _GOING.fullmatch(path.name):
            yield Entry(path.name, REMAINS, path, None, *_weight(path))
    for path in filter(_is_folder, _inside(folder / "kernels")):
        if _MLX.fullmatch(path.name):
            yield Entry(f"kernels-{path.name}", KERNELS, path, None, *_weight(path), state(path))
    for path in filter(_is_folder, _inside(folder / "prefix")):
        if match := _PROMPTS.fullmatch(path.name):
            yield Entry(f"prefix-{path.name}", PROMPTS, path, match[1].replace("--", "/"), *_weight(path))
    for name, (kind, pattern) in FILES.items():
        for path in _inside(folder / name):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and re.fullmatch(pattern, path.name):
                    yield Entry(f"{name}-{path.stem}", kind, path, None, status.st_size, status.st_mtime)


def _coding(manifest: Path) -> str | None:
    with suppress(OSError, ValueError, AttributeError):
        coding = parse_json(read_small(manifest, INDEX_BYTES)).get("coding")
        if isinstance(coding, str) and _CODING.fullmatch(coding):
            return coding
    return None


def _remove_conversation(path: Path) -> None:
    lock = path.with_name(f"{path.stem}.lock")
    with os.fdopen(os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise InUseError("in use by a process") from None
        path.unlink()  # not the lock file: processes that have it open and later ones must share one lock


def _inside(folder: Path) -> list[Path]:
    """Lists a folder, unless it is a link; the cache folder itself may be one."""
    if folder == cache_dir() or _is_folder(folder):
        with suppress(OSError):
            return sorted(folder.iterdir())
    return []


def _is_folder(path: Path) -> bool:
    with suppress(OSError):
        return stat.S_ISDIR(path.lstat().st_mode)
    return False


def _weight(folder: Path) -> tuple[int, float]:
    nbytes, used = 0, 0.0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                found = (Path(parent) / name).lstat()
                nbytes += found.st_size
                # Checking whether it is in use touches the writer's lock, which must not count.
                used = max(used, found.st_mtime if name != WRITER else 0.0)
    with suppress(OSError):
        used = used or folder.lstat().st_mtime
    return nbytes, used
