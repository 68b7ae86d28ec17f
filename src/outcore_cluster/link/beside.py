"""A run beside the one that ranks are of: what one of them starts is the same rank of it.

A process cannot share its rank's connections. So each rank listens anew, at the address that it has, and tells the
others the port; the key is made of the run's own, and never goes over the network.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from . import environment as names
from .meeting import listen
from .socket_link import SocketLink


@contextmanager
def run_beside(link: SocketLink, name: str) -> Iterator[tuple[dict[str, str], tuple[int, ...]]]:
    """What a process has to be started with to be this rank of another run; all ranks ask at the same time.

    Args:
        name: tells the run from others of the same ranks.

    Yields:
        variables, and descriptors that it has to inherit. One process can be started so.

    Raises:
        LinkError: this rank's address cannot be listened at, or the run of these ranks has failed.
    """
    me = link.identity
    host = me.addresses[me.rank][0]
    with listen((host, 0), me.who(me.rank)) as listener:
        ports = [int(told) for told in link.gather(str(listener.getsockname()[1]).encode())]
        key, write = os.pipe()
        try:
            with os.fdopen(write, "wb") as pipe:
                pipe.write(_key(me.key, name))
            addresses = [
                [f"[{host}]:{port}" if ":" in host else f"{host}:{port}"]
                for (host, _), port in zip(me.addresses, ports, strict=True)
            ]
            yield (
                {
                    names.RANK: str(me.rank),
                    names.ADDRESSES: json.dumps(addresses),
                    names.NAMES: json.dumps(list(me.names)),
                    names.RUN: f"{me.run} {name}",
                    names.FD: str(listener.fileno()),
                    names.KEY_FD: str(key),
                    # Something may stand between, such as a shell that enters a control group and becomes the process.
                    names.PARENT: str(os.getpid()),
                },
                (listener.fileno(), key),
            )
        finally:
            os.close(key)


def _key(key: bytes, name: str) -> bytes:
    return hmac.new(key, b"a run beside: " + name.encode(), hashlib.sha256).hexdigest().encode()
