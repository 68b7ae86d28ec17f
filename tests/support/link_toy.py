"""A program for several ranks that needs no model: a message goes round a ring of them, and all agree on a number.

    MLX_RANK=0 MLX_HOSTFILE=... python tests/support/link_toy.py ROUNDS [BYTES] [--sit RANK]

Rank 0 prints a line each round. ``--sit``: that rank's main thread then sits in a call that takes no exception, and the
others wait for it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from outcore.errors import OutcoreError
from outcore_cluster.environment import from_environment
from outcore_cluster.link_protocol import Link


def main() -> int:
    """Go round; the exit status."""
    parser = argparse.ArgumentParser()
    parser.add_argument("rounds", type=int)
    parser.add_argument("bytes", type=int, nargs="?", default=1000)
    parser.add_argument("--sit", type=int)
    parser.add_argument("--say-pids", action="store_true")
    args = parser.parse_args()
    link: Link | None = None
    try:
        link = from_environment()
        if link is None:
            print("alone")
            return 0
        if args.say_pids:
            pids = [value.decode() for value in link.gather(b"%d" % os.getpid())]
            if link.rank == 0:
                print("pids", *pids, flush=True)
        for number in range(args.rounds):
            around(link, number, args.bytes)
            if link.rank == args.sit:
                while True:
                    time.sleep(1000)
            if link.rank == 0:
                print("round", number, flush=True)
        link.close()
    except OutcoreError as e:
        print(f"toy: {e}", file=sys.stderr, flush=True)
        return 1
    return 0


def around(link: Link, number: int, nbytes: int) -> None:
    """One round; each rank adds one to the first byte, and rank 0 looks at what comes back."""
    assert link.agree(b"%d" % number if link.rank == 0 else b"") == b"%d" % number
    data = bytearray(nbytes)
    if link.rank == 0:
        link.send(1, memoryview(bytes([number % 100]) * nbytes))
        link.receive(link.size - 1, memoryview(data)).wait()
        assert data == bytes([number % 100 + link.size - 1]) * nbytes
    else:
        link.receive(link.rank - 1, memoryview(data)).wait()
        for at in range(0, nbytes, 4096):
            data[at : at + 4096] = bytes([data[at] + 1]) * len(data[at : at + 4096])
        link.send((link.rank + 1) % link.size, memoryview(data))
        link.flush()


if __name__ == "__main__":
    sys.exit(main())
