"""Hosts for benchmarks: network namespaces of this machine, each with an address on one bridge. Linux, as root.

    python benchmarks/namespaces.py [-flags ...] NAME COMMAND

runs a command in one of them, in the place of ``ssh`` (``outcore launch --ssh``): with pipes of its own in between, so
that it can be killed or stopped as ssh can.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO


@dataclass(frozen=True)
class Namespace:
    """One of them.

    Attributes:
        port: the bridge's end of its cable.
    """

    name: str
    address: str
    port: str

    def cut(self) -> None:
        """Pull the cable."""
        ip("link", "set", self.port, "down")

    def join(self) -> None:
        """Plug it in again."""
        ip("link", "set", self.port, "up")


def ip(*words: str) -> None:
    """``ip`` of iproute2."""
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@contextmanager
def namespaces(count: int, network: str = "10.83.7", cables: bool = True) -> Iterator[list[Namespace]]:
    """So many hosts; gone at the end. Without ``cables`` nothing joins them yet."""
    tag = f"r{os.getpid() % 100_000}"
    bridge = f"{tag}b"
    made = [Namespace(f"{tag}n{n}", f"{network}.{n + 1}", f"{tag}p{n}") for n in range(count)]
    try:
        ip("link", "add", bridge, "type", "bridge")
        ip("link", "set", bridge, "up")
        for host in made:
            ip("netns", "add", host.name)
            if not cables:
                continue
            ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("link", "set", host.port, "master", bridge, "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                ip("-n", host.name, "link", "set", device, "up")
        yield made
    finally:
        for host in made:
            subprocess.run(["ip", "netns", "del", host.name], capture_output=True)
            subprocess.run(["ip", "link", "del", host.port], capture_output=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True)


def _copy(source: IO[bytes], to: IO[bytes]) -> None:
    try:
        while data := os.read(source.fileno(), 1 << 16):
            to.write(data)
            to.flush()
    except OSError:
        pass
    finally:
        to.close()


def main(words: list[str]) -> int:
    """Run a command in a namespace, as ssh would on a host; its exit status."""
    name, command = words[-2:]
    # ``ip netns exec`` would put another /sys over this one, which has the control groups.
    done = subprocess.Popen(
        ["nsenter", f"--net=/run/netns/{name}", "sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert done.stdin is not None and done.stdout is not None
    threading.Thread(target=_copy, args=(sys.stdin.buffer, done.stdin), daemon=True).start()
    _copy(done.stdout, sys.stdout.buffer)
    return done.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
