"""Kills the commands that write at random moments, and looks at what the next run makes of it.

    python benchmarks/kills.py 1000 --json benchmarks/results/kills-cpu.json

Each trial has a cache folder of its own. A command is started in it and ended by SIGKILL: at a random moment of the
time that it takes, or at a random one of the changes that it makes to files (half of a write is done, then). Then the
same command runs undisturbed, and must end well, give the answers and leave the bytes of a run that was never
disturbed, and nothing else: not in the cache, beside the model, or among temporary files. In between there may be one
copy that is not finished.

One process imports everything and forks for every run, which takes a tenth of what starting Python does; it never
computes, because MLX's threads do not survive a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from kills_work import KINDS, Kind, make_world
from outcore_bench import disk as fingerprint

TIMES, EVENTS = "at a moment", "at a change of a file"
HUNG_S = 120.0


@dataclass
class Counts:
    """Of one kind of work: kills by what chose their moment, and runs that had ended before."""

    kind: str
    kills: dict[str, int] = field(default_factory=lambda: {TIMES: 0, EVENTS: 0})
    too_late: int = 0
    unfinished: int = 0
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Ended:
    """How a forked process ended: its status by waitpid, what it wrote to standard output and error, and seconds."""

    status: int
    said: str
    seconds: float


def forked(work: Callable[[], None], said: Path, kill_after: float | None = None) -> Ended:
    """Run ``work`` in a process of its own, and kill it after so many seconds."""
    began = time.perf_counter()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            work()
            sys.stdout.flush()
            status = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        finally:
            os._exit(status)
    status = _wait(pid, began, HUNG_S if kill_after is None else kill_after)
    return Ended(status, said.read_text(errors="replace") if said.exists() else "", time.perf_counter() - began)


def _wait(pid: int, began: float, most_s: float) -> int:
    while True:
        left = began + most_s - time.perf_counter()
        if left <= 0:
            os.kill(pid, signal.SIGKILL)
            return os.waitpid(pid, 0)[1]
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return status
        time.sleep(min(left, 0.002))


class FileEvents:
    """Counts the changes that this process makes to files, and kills it at one of them."""

    AUDITED = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "fcntl.flock", "os.symlink", "os.link")

    def __init__(self, kill_at: int | None) -> None:
        self.count = 0
        self._kill_at = kill_at
        self._write, self._fsync = os.write, os.fsync

    def watch(self) -> None:
        """From here on. It cannot be ended: an audit hook stays for good."""
        sys.addaudithook(self._audit)
        os.write = self._half
        os.fsync = self._synced

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in self.AUDITED:
            self._event()

    def _event(self, before: Callable[[], object] = lambda: None) -> None:
        self.count += 1
        if self.count == self._kill_at:
            before()
            os.kill(os.getpid(), signal.SIGKILL)

    def _half(self, fd: int, data: Any) -> int:
        half = memoryview(data).cast("B")[: len(memoryview(data).cast("B")) // 2]
        self._event(lambda: self._write(fd, half))
        return self._write(fd, data)

    def _synced(self, fd: Any) -> None:
        self._event()
        self._fsync(fd)


TIMED = "calibration", "drafts-seen", "runs"
"""Folders of the cache whose files have times in them."""


def files_in(folder: Path) -> dict[str, str]:
    """Every file below a folder, with a digest of its bytes; of JSON that has times in it, only that it is there."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            timed = path.name.startswith("manifest") or path.parent.name in TIMED
            found[str(path.relative_to(folder))] = "" if timed else xxhash.xxh3_64_hexdigest(path.read_bytes())
    return found


def unfinished(cache: Path) -> int:
    """Copies in the cache that have no manifest yet."""
    others = {"calibration", "checked", "kernels"}
    copies = [p for p in cache.iterdir() if p.is_dir() and p.name not in others] if cache.is_dir() else []
    return sum(not (copy / "manifest.json").exists() for copy in copies)


class Trials:
    """Trials of one kind of work, beside a run that was never disturbed."""

    def __init__(self, kind: Kind, world: Path, rng: random.Random) -> None:
        self.kind, self.world, self.rng = kind, world, rng
        self.counts = Counts(kind.name)
        self._beside = files_in(world / "models")
        room = self._room()
        events = room / "events"

        def counted() -> None:
            watched = FileEvents(None)
            watched.watch()
            self.kind.run(world / "models", room)
            watched._fsync(1)
            events.write_text(str(watched.count))

        ended = forked(counted, room / "said")
        if ended.status:
            raise RuntimeError(f"{kind.name} fails without being killed: {ended.said[-2000:]}")
        self.events = int(events.read_text())
        self.answer = kind.answer(ended.said, room)
        self.cache = files_in(room / "cache")
        shutil.rmtree(room)
        # How long it takes, without counting.
        room = self._room()
        self.seconds = forked(lambda: self.kind.run(world / "models", room), room / "said").seconds
        shutil.rmtree(room)

    def _room(self) -> Path:
        return Path(tempfile.mkdtemp(prefix="room-", dir=self.world))

    def once(self) -> None:
        """One kill, and the run after it."""
        room = self._room()
        how = self.rng.choice((TIMES, EVENTS))
        kill_at = self.rng.randint(1, self.events) if how == EVENTS else None
        kill_after = self.rng.uniform(0, self.seconds) if how == TIMES else None

        def work() -> None:
            if kill_at is not None:
                FileEvents(kill_at).watch()
            self.kind.run(self.world / "models", room)

        ended = forked(work, room / "said", kill_after)
        if ended.status == 0:
            self.counts.too_late += 1
        elif ended.status != signal.SIGKILL:
            self._failed(f"{how} {kill_at or kill_after}: ended with {ended.status}: {ended.said[-1500:]}")
        else:
            self.counts.kills[how] += 1
            begun = unfinished(room / "cache")
            self.counts.unfinished += begun
            if begun > 1:
                self._failed(f"{how} {kill_at or kill_after}: {begun} unfinished copies")
            self._again(room, f"{how} {kill_at or kill_after}")
        shutil.rmtree(room)

    def _again(self, room: Path, when: str) -> None:
        ended = forked(lambda: self.kind.run(self.world / "models", room), room / "said")
        if ended.status:
            self._failed(f"{when}: the next run ended with {ended.status}: {ended.said[-1500:]}")
            return
        if (answer := self.kind.answer(ended.said, room)) != self.answer:
            self._failed(f"{when}: the next run's answer differs: {str(answer)[:300]}")
        if (cache := files_in(room / "cache")) != self.cache:
            self._failed(f"{when}: in the cache: {sorted(set(cache.items()) ^ set(self.cache.items()))[:6]}")
        if (beside := files_in(self.world / "models")) != self._beside:
            self._failed(f"{when}: beside the model: {sorted(set(beside.items()) ^ set(self._beside.items()))[:6]}")
        if left := sorted(p.name for p in (self.world / "tmp").iterdir() if p.name != "mlx"):
            self._failed(f"{when}: temporary files: {left[:6]}")

    def _failed(self, what: str) -> None:
        self.counts.failures.append(what)
        print(f"{self.kind.name}: {what}", file=sys.stderr, flush=True)


def _make_tmp(world: Path) -> None:
    """A folder for temporary files; what MLX has compiled is where it always is, or each process would compile anew."""
    compiled = Path(tempfile.gettempdir()) / "mlx"
    compiled.mkdir(exist_ok=True)
    (world / "tmp").mkdir()
    (world / "tmp" / "mlx").symlink_to(compiled)


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills at random moments, and what the next run makes of them.")
    parser.add_argument("kills", type=int, help="Kills in all, shared among the kinds by what one takes.")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    kinds = [KINDS[name] for name in args.kinds.split(",")]
    shares = sum(kind.share for kind in kinds)
    found: list[Counts] = []
    with contextlib.ExitStack() as stack:
        world = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="outcore-kills-")))
        _make_tmp(world)
        made = forked(lambda: make_world(world / "models"), world / "said")
        if made.status:
            raise RuntimeError(made.said)
        for kind in kinds:
            trials = Trials(kind, world, random.Random(f"{args.seed} {kind.name}"))
            wanted = round(args.kills * kind.share / shares)
            while sum(trials.counts.kills.values()) < wanted and len(trials.counts.failures) < 20:
                trials.once()
            found.append(trials.counts)
            print(f"{kind.name}: {sum(trials.counts.kills.values())} kills, {trials.events} changes of files a run, "
                  f"{trials.seconds:.2f} s, {len(trials.counts.failures)} failures", flush=True)  # fmt: skip
    if args.json is not None:
        document = {
            "machine": asdict(fingerprint.machine(Path.cwd())),
            "command": ["benchmarks/kills.py", str(args.kills), "--kinds", args.kinds, "--seed", str(args.seed)],
            "kills": sum(sum(c.kills.values()) for c in found),
            "failures": sum(len(c.failures) for c in found),
            "results": [asdict(c) for c in found],
        }
        args.json.write_text(json.dumps(document, indent=1))
    return int(any(c.failures for c in found))


if __name__ == "__main__":
    sys.exit(main())
