"""Two copies of a model on two slow disks: do their rates add up, and what becomes of a text when one dies?

    python benchmarks/mirrors.py MODEL --dtype float32 --json benchmarks/results/mirrors-cpu.json

Makes two disks of image files (ext4 on loop devices), copies the model on each, and gives each a rate of its own
(a control group of version 1, `blkio`). All of that takes root on Linux. Then `outcore generate --resident 0` answers
with each copy alone, with both, either being the model's own folder, and with both while one dies: its image loses all
of its bytes in the middle, and the loop device answers with errors (EIO). `outcore plan` says before what to expect.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from outcore.checks import parse_size
from result_file import write_result
from serving import command
from slow_disk import GROUPS

PROMPT = "def read_lines(path):\n    "


class Disk:
    """A file system in an image file, and the model's folder on it."""

    def __init__(self, image: Path, model: Path, rate: int) -> None:
        self.image, self.rate = image, rate
        self.mounted = image.with_suffix("")
        nbytes = sum(f.stat().st_size for f in model.iterdir() if f.is_file())
        with image.open("wb") as file:
            file.truncate(nbytes * 5 // 4 + (32 << 20))
        _run("mkfs.ext4", "-q", "-m", "0", str(image))
        self.device = _run("losetup", "--find", "--show", str(image))
        self.mounted.mkdir()
        _run("mount", self.device, str(self.mounted))
        self.folder = self.mounted / model.name
        shutil.copytree(model, self.folder)
        os.sync()
        number = self.folder.stat().st_dev
        self.limit = f"{os.major(number)}:{os.minor(number)} {rate}"

    def die(self) -> None:
        """Take its bytes away."""
        os.truncate(self.image, 0)

    def close(self) -> None:
        _run("umount", "--lazy", str(self.mounted))
        # It may have gone with the file system.
        subprocess.run(["losetup", "--detach", self.device], check=False, capture_output=True)
        self.image.unlink()


@contextmanager
def disks(model: Path, rates: list[int]) -> Iterator[tuple[list[Disk], Path]]:
    """Disks of these rates with the model on each, and the group for which they hold."""
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        group = GROUPS / f"outcore-mirrors-{os.getpid()}"
        group.mkdir()
        stack.callback(_remove, group)
        made = []
        for n, rate in enumerate(rates):
            made.append(Disk(root / f"disk{n}.img", model, rate))
            stack.callback(made[-1].close)
            (group / "blkio.throttle.read_bps_device").write_text(made[-1].limit)
        yield made, group


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


def _remove(group: Path) -> None:
    for _ in range(100):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


def answered(group: Path, own: Disk, mirrors: list[Disk], args: argparse.Namespace, dying: Disk | None) -> Any:
    """What `outcore generate` says; ``dying`` loses its bytes ``args.dies`` seconds after it began to read."""
    words = ["generate", str(own.folder), "--resident", "0", "--draft", "none", "--temp", "0", "--json", "--quiet"]
    words += ["--max-tokens", str(args.tokens), "--prompt", PROMPT, *_shared(mirrors, args)]
    process = subprocess.Popen(command(group, *words), stdout=subprocess.PIPE, text=True)
    if dying is not None:
        timer = threading.Timer(args.dies, dying.die)
        timer.start()
    out, _ = process.communicate(timeout=1800)
    if process.returncode:
        raise SystemExit(f"outcore {' '.join(words)} failed: {out}")
    return json.loads(out.splitlines()[-1])


def _shared(mirrors: list[Disk], args: argparse.Namespace) -> list[str]:
    words = [word for mirror in mirrors for word in ("--mirror", str(mirror.folder))]
    return [*words, *(["--dtype", args.dtype] if args.dtype else [])]


def planned(group: Path, own: Disk, mirrors: list[Disk], args: argparse.Namespace) -> float:
    """Tokens a second that `outcore plan` predicts; what is not known is measured."""
    words = ["plan", str(own.folder), "--resident", "0", "--draft", "none", "--json", "--quiet"]
    done = subprocess.run(command(group, *words, *_shared(mirrors, args)), stdout=subprocess.PIPE, text=True)
    return float(json.loads(done.stdout.splitlines()[-1])["predicted_tps"])


def row(name: str, found: Any, own: Disk, mirrors: list[Disk], predicted: float | None) -> dict[str, Any]:
    """One line of the result. ``mbps``: bytes of the streamed layers over the seconds of decoding them."""
    each = found["bytes_read"] / found["sweeps"]
    read = [m["bytes_read"] for m in found["mirrors"]] or [found["bytes_read"]]
    return {
        "name": name,
        "rates_mbps": [d.rate / 1e6 for d in (own, *mirrors)],
        "decode_tps": found["generation_tps"],
        "predicted_tps": predicted,
        "mbps": each * found["generation_tps"] / 1e6,
        "mbps_while_reading": found["read_gbps"] * 1e3,
        "bytes_read": read,
        "lost": [m["lost"] is not None for m in found["mirrors"]],
        "io": found["io"],
        "sweeps": found["sweeps"],
        "tokens": found["tokens"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rates", default="20MB,40MB", help="bytes a second of the disks (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--dtype")
    parser.add_argument("--dies", type=float, default=12.0, help="seconds after which one dies (default: %(default)s)")
    parser.add_argument("--no-plan", action="store_true", help="predict nothing")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rates = [parse_size(rate) for rate in args.rates.split(",")]
    os.environ["OUTCORE_CACHE"] = cache = tempfile.mkdtemp(prefix="outcore-mirrors-")
    rows: list[dict[str, Any]] = []
    try:
        for name, dying in (("one", None), ("both", None), ("mirror dies", 1), ("own dies", 0)):
            with disks(args.model, rates) as (made, group):
                for own in made if dying is None else made[:1]:
                    mirrors = [] if name == "one" else [d for d in made if d is not own]
                    predict = dying is None and not args.no_plan
                    predicted = planned(group, own, mirrors, args) if predict else None
                    found = answered(group, own, mirrors, args, None if dying is None else made[dying])
                    rows.append(row(name, found, own, mirrors, predicted))
                    shown = {k: v for k, v in rows[-1].items() if k != "tokens"}
                    print(shown, "same text" if found["tokens"] == rows[0]["tokens"] else "ANOTHER TEXT", flush=True)
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    same = all(r["tokens"] == rows[0]["tokens"] for r in rows)
    write_result(args.json, "mirrors", args.model, results=rows, same_text=same)
    if not same:
        raise SystemExit("another text")


if __name__ == "__main__":
    main()
