"""Outcore's link and ``mx.distributed``'s ring, side by side: two processes of this machine, over loopback.

    python benchmarks/rank_transports.py [--rounds 60] [--turns 3] [--json FILE]

Times a message to the other rank and back (4 KB to 4 MB, host memory to host memory), and what ranks agree on (8 bytes:
``gather`` there, ``all_sum`` here), in turn. Then rank 1 is killed, or stopped by SIGSTOP, while rank 0 waits for it:
how and when rank 0 ends. What counts is the ratio of two rows of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Protocol

import _support  # noqa: F401
from result_file import shown_arguments

SIZES = (4 << 10, 64 << 10, 1 << 20, 4 << 20)
PATIENCE_S = 30.0
"""Seconds after which rank 0 counts as hanging."""


class Transport(Protocol):
    rank: int

    def there_and_back(self, nbytes: int) -> None: ...

    def agree(self) -> None: ...


class OurLink:
    def __init__(self) -> None:
        from outcore_cluster.environment import from_environment

        link = from_environment()
        assert link is not None
        self._link, self.rank = link, link.rank

    def there_and_back(self, nbytes: int) -> None:
        into, peer = memoryview(bytearray(nbytes)), 1 - self.rank
        arrival = self._link.receive(peer, into)
        if self.rank == 0:
            self._link.send(peer, memoryview(bytes(nbytes)))
            arrival.wait()
        else:
            arrival.wait()
            self._link.send(peer, into)
        self._link.flush()

    def agree(self) -> None:
        self._link.gather(bytes(8))


class MlxRing:
    def __init__(self) -> None:
        import mlx.core as mx

        self._mx: Any = mx
        self._group = mx.distributed.init(strict=True, backend="ring")
        self.rank = self._group.rank()

    def there_and_back(self, nbytes: int) -> None:
        mx, peer = self._mx, 1 - self.rank
        if self.rank == 0:
            mx.eval(mx.distributed.send(mx.zeros((nbytes,), dtype=mx.uint8), peer, group=self._group))
            mx.eval(mx.distributed.recv((nbytes,), mx.uint8, peer, group=self._group))
        else:
            came = mx.distributed.recv((nbytes,), mx.uint8, peer, group=self._group)
            mx.eval(came)
            mx.eval(mx.distributed.send(came, peer, group=self._group))

    def agree(self) -> None:
        self._mx.eval(self._mx.distributed.all_sum(self._mx.ones((2,)), group=self._group))


TRANSPORTS: dict[str, Any] = {"outcore": OurLink, "ring": MlxRing}


def rank(name: str, rounds: int, disturbed: bool) -> None:
    """One of the two processes; rank 0 prints what it found."""
    transport: Transport = TRANSPORTS[name]()
    transport.agree()
    if disturbed:
        print("waits", flush=True)
        if transport.rank:
            time.sleep(10 * PATIENCE_S)  # and is killed or stopped
        transport.there_and_back(SIZES[0])
        return
    found = {}
    for what, do in [
        *((f"{n >> 10} KB", lambda n=n: transport.there_and_back(n)) for n in SIZES),
        ("agree", transport.agree),
    ]:
        took = []
        for _ in range(rounds):
            began = time.perf_counter()
            do()
            took.append(time.perf_counter() - began)
        found[what] = statistics.median(took)
    if transport.rank == 0:
        print(json.dumps(found), flush=True)


def started(name: str, folder: Path, *more: str) -> list[subprocess.Popen[str]]:
    """Both processes."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    file = folder / "hosts.json"
    file.write_text(json.dumps([[f"127.0.0.1:{each.getsockname()[1]}"] for each in sockets]))
    for each in sockets:
        each.close()
    return [
        subprocess.Popen(
            [sys.executable, __file__, "--rank-of", name, *more],
            env={**os.environ, "MLX_RANK": str(n), "MLX_HOSTFILE": str(file), "OUTCORE_LINK_KEY": "0123456789abcdef"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]


def timed(name: str, folder: Path, rounds: int) -> dict[str, float]:
    """Median seconds by what was done."""
    first, other = started(name, folder, "--rounds", str(rounds))
    out, err = first.communicate(timeout=300)
    other.wait(timeout=30)
    assert first.returncode == 0, err
    found: dict[str, float] = json.loads(out.splitlines()[-1])
    return found


def disturbed(name: str, folder: Path, sign: signal.Signals) -> dict[str, Any]:
    """How rank 0 ends when rank 1 gets a signal."""
    first, other = started(name, folder, "--disturbed")
    try:
        for each in (first, other):
            assert each.stdout is not None
            each.stdout.readline()
        time.sleep(1.0)
        other.send_signal(sign)
        began = time.monotonic()
        try:
            _, err = first.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            return {"ends_s": None, "status": None, "says": "nothing: it hangs"}
        says = err.strip().splitlines()[-1:] or [""]
        return {"ends_s": round(time.monotonic() - began, 1), "status": first.returncode, "says": says[0][:160]}
    finally:
        for each in (first, other):
            each.kill()
            each.wait()


def main() -> None:
    flags = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    flags.add_argument("--rounds", type=int, default=60)
    flags.add_argument("--turns", type=int, default=3)
    flags.add_argument("--json", type=Path)
    flags.add_argument("--rank-of", choices=tuple(TRANSPORTS), help=argparse.SUPPRESS)
    flags.add_argument("--disturbed", action="store_true", help=argparse.SUPPRESS)
    args = flags.parse_args()
    if args.rank_of is not None:
        rank(args.rank_of, args.rounds, args.disturbed)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        turns = [{name: timed(name, folder, args.rounds) for name in TRANSPORTS} for _ in range(args.turns)]
        rows = []
        for what in turns[0]["ring"]:
            ratios = [turn["outcore"][what] / turn["ring"][what] for turn in turns]
            seconds = {name: statistics.median(turn[name][what] for turn in turns) for name in TRANSPORTS}
            rows.append({"what": what, "ratio": round(statistics.median(ratios), 2), "ratios": ratios, **seconds})
            print(f"{what:>8}: ours takes {rows[-1]['ratio']:.2f} of the ring's time", flush=True)
        ends = {
            f"{name}, {sign.name}": disturbed(name, folder, sign)
            for sign in (signal.SIGKILL, signal.SIGSTOP)
            for name in TRANSPORTS
        }
    for what, end in ends.items():
        print(f"{what}: ends after {end['ends_s']} s with status {end['status']}: {end['says']}")
    if args.json is not None:
        document = {"arguments": shown_arguments(), "rows": rows, "ends": ends}
        args.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
