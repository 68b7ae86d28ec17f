"""Makes the link of a process that was started as one rank of several, from its environment.

    MLX_RANK, MLX_HOSTFILE          set by mlx.launch for its ring: this rank, and a file with each rank's addresses,
                                    [["10.0.0.1:32323"], ["10.0.0.2:32324"]], of which the first is used
    OUTCORE_LINK_KEY_FILE           a file with the run's key that only its user may read
    OUTCORE_LINK_KEY                the key itself; others on the host may see it
    OUTCORE_LINK_STALL_S            ``LinkLimits.stall``
    OUTCORE_LINK_BACKEND            a backend of mx.distributed in place of Outcore's link (``mlx_link``)

If mlx.launch has set up another backend than the ring (``NAMED_BY``), that one is used. ``outcore launch`` writes no
files. It sets ``OUTCORE_LINK_ADDRESSES`` (the file's content), ``OUTCORE_LINK_RUN`` (the run's name),
``OUTCORE_LINK_NAMES`` (the hosts' names), ``OUTCORE_LINK_FD`` (the listening socket), ``OUTCORE_LINK_KEY_FD`` (a pipe
with the key), ``OUTCORE_LINK_PARENT`` (the process that this one must not outlive; 0: none) and
``OUTCORE_LINK_START_S`` (seconds until all ranks must be connected).
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import stat
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from outcore.errors import UsageError
from outcore.machine.small_files import read_small
from outcore.text import one_line, shortened
from outcore.version import __version__

from .link.meeting import Identity
from .link.socket_link import SocketLink
from .link_protocol import LinkLimits

if TYPE_CHECKING:
    from .mlx_link import MlxLink

RANK, HOSTFILE, BACKEND = "MLX_RANK", "MLX_HOSTFILE", "OUTCORE_LINK_BACKEND"
KEY, KEY_FILE = "OUTCORE_LINK_KEY", "OUTCORE_LINK_KEY_FILE"
ADDRESSES, KEY_FD = "OUTCORE_LINK_ADDRESSES", "OUTCORE_LINK_KEY_FD"
RUN, NAMES, FD = "OUTCORE_LINK_RUN", "OUTCORE_LINK_NAMES", "OUTCORE_LINK_FD"
PARENT, START_S, STALL_S = "OUTCORE_LINK_PARENT", "OUTCORE_LINK_START_S", "OUTCORE_LINK_STALL_S"
# For each backend of mx.distributed, a variable that is set if the ranks were started for this backend.
NAMED_BY = {"jaccl": "MLX_JACCL_COORDINATOR", "nccl": "NCCL_HOST_IP", "mpi": "OMPI_COMM_WORLD_SIZE"}
ALL = (RANK, HOSTFILE, BACKEND, KEY, KEY_FILE, ADDRESSES, KEY_FD, RUN, NAMES, FD, PARENT, START_S, STALL_S)
# Least bytes of a key; a shorter one could be guessed by a listener on the network.
LEAST_KEY = 16
MOST_BYTES = 1 << 20


def from_environment(
    environment: MutableMapping[str, str] = os.environ,
    limits: LinkLimits | None = None,
    leave: Callable[[int], None] | None = os._exit,
) -> SocketLink | MlxLink | None:
    """Returns this process's link once all ranks are connected; None if the process is not one rank of several.

    Removes the variables, so that processes that a rank starts are not ranks. Call it before slow imports: the other
    ranks wait only ``LinkLimits.start`` seconds.

    Raises:
        UsageError: a variable is invalid, or there is no key.
        LinkError: another rank did not connect in time.
    """
    backend = environment.get(BACKEND) or next((name for name, by in NAMED_BY.items() if environment.get(by)), None)
    if backend is None:
        return _of_sockets(environment, limits or LinkLimits(), leave)
    from .mlx_link import MlxLink

    link = MlxLink(backend)
    for name in (*ALL, *NAMED_BY.values()):
        environment.pop(name, None)
    return link if link.size > 1 else None


def _of_sockets(
    environment: MutableMapping[str, str], limits: LinkLimits, leave: Callable[[int], None] | None
) -> SocketLink | None:
    if environment.get(RANK) is None or not (environment.get(HOSTFILE) or environment.get(ADDRESSES)):
        return None
    addresses = _addresses(environment)
    if len(addresses) < 2:
        return None
    if (rank := environment[RANK]) not in map(str, range(len(addresses))):
        raise UsageError(f"{RANK}: {shortened(rank)}: give a whole number below {len(addresses)}")
    names = json.loads(environment.get(NAMES, "[]")) or [host for host, _ in addresses]
    run = environment.get(RUN) or hashlib.sha256(repr(addresses).encode()).hexdigest()[:16]
    me = Identity(int(rank), addresses, names, run, _key(environment), __version__)
    start, stall = environment.get(START_S, limits.start), environment.get(STALL_S, limits.stall)
    try:
        limits = replace(limits, start=float(start), stall=float(stall))
    except ValueError:
        raise UsageError(f"{STALL_S}: {shortened(stall)}: give seconds") from None
    listener = socket.socket(fileno=int(environment[FD])) if FD in environment else None
    parent = int(environment.get(PARENT, os.getppid()))
    for name in ALL:
        environment.pop(name, None)

    def alone() -> str | None:
        return "what started it is gone" if parent and os.getppid() != parent else None

    return SocketLink(me, limits, listener, leave, alone)


def _addresses(environment: Mapping[str, str]) -> list[tuple[str, int]]:
    source = ADDRESSES if environment.get(ADDRESSES) else f"{HOSTFILE}: {environment[HOSTFILE]}"
    try:
        text = environment.get(ADDRESSES) or read_small(Path(environment[HOSTFILE]), MOST_BYTES).strip()
        ranks = json.loads(text) if text else []
        found = [_address(rank[0]) for rank in ranks]
    except OSError as e:
        raise UsageError(f"{source}: {e.strerror or one_line(e)}") from e
    except (ValueError, TypeError, LookupError) as e:
        raise UsageError(f'{source}: not a list of addresses for each rank, [["10.0.0.1:32323"], ...]') from e
    if len(set(found)) < len(found):
        raise UsageError(f"{source}: two ranks have the same address")
    return found


def _address(text: object) -> tuple[str, int]:
    host, _, port = str(text).rpartition(":")
    if not host or not 0 < int(port) < 65536:
        raise ValueError(text)
    return host.strip("[]"), int(port)


def _key(environment: Mapping[str, str]) -> bytes:
    if KEY_FD in environment:
        with os.fdopen(int(environment[KEY_FD]), "rb") as pipe:
            return _checked(pipe.read(4096).strip(), KEY_FD)
    if name := environment.get(KEY_FILE):
        return _checked(_key_of(Path(name).expanduser()), KEY_FILE)
    if text := environment.get(KEY):
        return _checked(text.encode(errors="surrogateescape"), KEY)
    raise UsageError(
        "ranks need a key, so that strangers cannot join: start them with outcore launch, or put the same random text, "
        f"{LEAST_KEY} characters or more, into a file on each host and name it in {KEY_FILE} (mlx.launch --env "
        f"{KEY_FILE}=...)"
    )


def _checked(key: bytes, name: str) -> bytes:
    if len(key) < LEAST_KEY:
        raise UsageError(f"{name}: the key has {len(key)} characters; give {LEAST_KEY} or more, at random")
    return key


def _key_of(path: Path) -> bytes:
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UsageError(f"{KEY_FILE}: {path}: others can read it, or write to it; chmod 600 it")
        return read_small(path, 4096).strip()
    except OSError as e:
        raise UsageError(f"{KEY_FILE}: {path}: {e.strerror or one_line(e)}") from e
