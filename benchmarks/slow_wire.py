"""A network between namespaces that is late and slow: what netem does, for kernels that have none. Linux, as root.

    python benchmarks/slow_wire.py --delay 0.0005 --rate 125e6 NAMESPACE=ADDRESS ...

gives each namespace a device ``eth0`` (TUN, ``Documentation/networking/tuntap.rst``), and carries packets between them
until its input ends: each leaves its sender behind what that sent before, at so many bytes a second, and arrives so
many seconds later. It prints ``ready`` when it does.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import heapq
import ipaddress
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from namespaces import Namespace, ip

MTU = 60_000
"""Bytes of a packet. A carrier in Python takes some 10 µs for each."""

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
DESTINATION = slice(16, 20)
"""Of an IPv4 packet."""


@contextmanager
def slow_wire(hosts: Sequence[Namespace], delay_s: float, rate: float) -> Iterator[None]:
    """Join hosts by a wire: seconds from one to another, and bytes a second of what each sends."""
    words = [f"{host.name}={host.address}" for host in hosts]
    command = [sys.executable, __file__, "--delay", str(delay_s), "--rate", str(rate), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as carrier:
        assert carrier.stdin is not None and carrier.stdout is not None
        try:
            if carrier.stdout.readline() != "ready\n":
                raise RuntimeError("the wire could not be laid")
            yield
        finally:
            carrier.stdin.close()


def device(namespace: str, address: str, n: int) -> int:
    """A namespace's ``eth0``, as a descriptor that reads what is sent there."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    name = f"w{os.getpid() % 100_000}x{n}"
    fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    ip("link", "set", name, "netns", namespace, "name", "eth0")
    ip("-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
    ip("-n", namespace, "link", "set", "eth0", "mtu", str(MTU), "up")
    ip("-n", namespace, "link", "set", "lo", "up")
    return fd


def carry(devices: dict[bytes, int], delay_s: float, rate: float) -> None:
    """Until standard input ends."""
    free = dict.fromkeys(devices.values(), 0.0)
    under_way: list[tuple[float, int, int, bytes]] = []
    count = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.perf_counter()) if under_way else None
        ready, _, _ = select.select([*devices.values(), 0], [], [], wait)
        if 0 in ready:
            return
        for fd in ready:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(fd, MTU + 64)
                now = time.perf_counter()
                free[fd] = max(free[fd], now) + len(packet) / rate
                to = devices.get(packet[DESTINATION])
                if packet[0] >> 4 == 4 and to is not None:
                    count += 1
                    heapq.heappush(under_way, (free[fd] + delay_s, count, to, packet))
        while under_way and under_way[0][0] <= time.perf_counter():
            *_, to, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError):
                os.write(to, packet)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delay", type=float, required=True, help="seconds, one way")
    parser.add_argument("--rate", type=float, required=True, help="bytes a second of each sender")
    parser.add_argument("hosts", nargs="+", metavar="NAMESPACE=ADDRESS")
    args = parser.parse_args()
    devices = {}
    for n, (name, address) in enumerate(given.split("=") for given in args.hosts):
        devices[ipaddress.ip_address(address).packed] = device(name, address, n)
    print("ready", flush=True)
    carry(devices, args.delay, args.rate)
    return 0


if __name__ == "__main__":
    sys.exit(main())
