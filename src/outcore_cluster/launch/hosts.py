"""The hosts of a run, and their addresses."""

from __future__ import annotations

import ipaddress
import json
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from outcore.errors import UsageError
from outcore.machine.small_files import CONFIG_BYTES, read_small
from outcore.text import one_line, quoted, shortened

LOCAL = ("local", "localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Host:
    """One rank's host: its name for ssh and in messages, and the address to which other ranks connect."""

    name: str
    address: str

    @property
    def local(self) -> bool:
        return self.name in LOCAL


@dataclass(frozen=True)
class Hosts:
    """All hosts, by rank, and the environment variables of a hostfile."""

    hosts: Sequence[Host]
    variables: dict[str, str] = field(default_factory=dict)


def find_hosts(names: str | None, hostfile: str | None, repeat: int) -> Hosts:
    """Returns the hosts that the flags name. Raises ``UsageError`` if there are none, or if one is invalid."""
    if (names is None) == (hostfile is None):
        raise UsageError("give --hosts, such as local,mini.local, or --hostfile")
    if repeat < 1:
        raise UsageError(f"--repeat-hosts {repeat}: give 1 or more")
    if hostfile is not None:
        found, variables = _from_file(Path(hostfile).expanduser())
    else:
        found, variables = [(name.strip(), None) for name in str(names).split(",")], {}
    if any(not name or name.startswith("-") for name, _ in found):
        raise UsageError(f"{'--hosts' if names else hostfile}: a host without a name, or one that begins with -")
    found = [entry for entry in found for _ in range(repeat)]
    own = _own_address([entry for entry in found if entry[0] not in LOCAL])
    return Hosts([Host(n, a or (own if n in LOCAL else _resolved(n))) for n, a in found], variables)


def _from_file(path: Path) -> tuple[list[tuple[str, str | None]], dict[str, str]]:
    """Reads names, addresses and variables as ``mlx._distributed_utils.common.Hostfile.from_file`` does."""
    try:
        data = json.loads(read_small(path, CONFIG_BYTES))
        hosts = data["hosts"] if isinstance(data, dict) else data
        variables = data.get("envs", []) if isinstance(data, dict) else []
        found = [(str(host["ssh"]), str(host["ips"][0]) if host.get("ips") else None) for host in hosts]
        return found, dict(variable_of(text, str(path)) for text in variables)
    except OSError as e:
        raise UsageError(f"--hostfile {path}: {e.strerror or one_line(e)}") from e
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as e:
        if isinstance(e, UsageError):
            raise
        raise UsageError(f'--hostfile {path}: not a list such as [{{"ssh": "a", "ips": ["10.0.0.1"]}}, ...]') from e


def variable_of(text: object, where: str = "--env") -> tuple[str, str]:
    """Splits ``NAME=VALUE``. Raises ``UsageError`` if the text is something else."""
    name, equals, value = str(text).partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{where}: {shortened(text)}: give NAME=VALUE")
    return name, value


def _resolved(name: str) -> str:
    host = name.rpartition("@")[2]
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as e:
        raise UsageError(
            f"{quoted(host)} has no address here ({getattr(e, 'strerror', None) or one_line(e)}); if ssh knows it by "
            'another name, give a --hostfile: [{"ssh": "name", "ips": ["10.0.0.2"]}, ...]'
        ) from e


def _own_address(others: Sequence[tuple[str, str | None]]) -> str:
    """Returns this machine's address in the network of the first other host; loopback if there is no other."""
    if not others:
        return "127.0.0.1"
    name, address = others[0]
    target = address or _resolved(name)
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    # Connecting a UDP socket sends nothing; it only chooses the route.
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect((target, 9))
        except OSError as e:
            raise UsageError(f"{quoted(name)}, {target}: {e.strerror or one_line(e)}") from e
        return str(sock.getsockname()[0])


def remote_command(ssh: str, name: str, directory: str, python: str) -> list[str]:
    """Returns the command that starts a guard on another host. The guard's input ends when the connection does."""
    # The user's shell there may be any; it only starts sh.
    script = f"cd {shlex.quote(directory)} 2>/dev/null; exec {shlex.quote(python)} -m outcore_cluster.launch.guard"
    there = f"exec sh -c {shlex.quote(script)}"
    options = ["-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ServerAliveInterval=2"]
    return [*shlex.split(ssh), *options, name, there]
