"""What a rank's environment says of it, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from link_ranks import QUICK, in_threads
from outcore.errors import UsageError
from outcore_cluster import environment as e
from outcore_cluster.link.socket_link import SocketLink

KEY = "0123456789abcdef"
TOY = Path(__file__).parent / "support" / "link_toy.py"
LAUNCH = Path(sys.executable).parent / "mlx.launch"


@pytest.fixture
def hosts(tmp_path: Path) -> Path:
    path = tmp_path / "hosts.json"
    path.write_text('[["127.0.0.1:47001"], ["127.0.0.1:47002"]]')
    return path


@pytest.mark.parametrize("environment", [{}, {"MLX_RANK": "0"}, {"MLX_RANK": "0", "MLX_HOSTFILE": ""}])
def test_a_process_that_is_no_rank_has_no_link(environment: dict[str, str]) -> None:
    assert e.from_environment(environment) is None


@pytest.mark.parametrize("text", ["", "\n", '[["127.0.0.1:1"]]'])
def test_one_rank_alone_has_no_link(text: str, tmp_path: Path) -> None:
    """mlx.launch writes an empty file for one host."""
    (tmp_path / "hosts").write_text(text)
    assert e.from_environment({"MLX_RANK": "0", "MLX_HOSTFILE": str(tmp_path / "hosts")}) is None


@pytest.mark.parametrize(
    ("text", "changes", "says"),
    [
        ("{", {}, "not a list of addresses"),
        ("[[1], [2]]", {}, "not a list of addresses"),
        ('[["a:1"], []]', {}, "not a list of addresses"),
        ('[["a:1"], ["a:70000"]]', {}, "not a list of addresses"),
        ('[["a:1"], ["a:1"]]', {}, "two ranks have the same address"),
        (None, {"MLX_RANK": "2"}, "MLX_RANK: 2: give a whole number below 2"),
        (None, {"MLX_RANK": "-1"}, "MLX_RANK: -1: give a whole number"),
        (None, {"MLX_RANK": "one"}, "MLX_RANK: one: give a whole number"),
        (None, {"MLX_HOSTFILE": "/no/such/file"}, "MLX_HOSTFILE: /no/such/file: No such file"),
        (None, {"OUTCORE_LINK_KEY": "short"}, "OUTCORE_LINK_KEY: the key has 5 characters; give 16 or more"),
        (None, {"OUTCORE_LINK_KEY_FILE": "/no/key"}, "OUTCORE_LINK_KEY_FILE: /no/key: No such file"),
    ],
)
def test_what_cannot_be_meant_is_refused(text: str | None, changes: dict[str, str], says: str, hosts: Path) -> None:
    if text is not None:
        hosts.write_text(text)
    given = {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts), "OUTCORE_LINK_KEY": KEY}
    with pytest.raises(UsageError, match=re.escape(says)):
        e.from_environment(given | changes)


def test_ranks_need_a_key(hosts: Path) -> None:
    with pytest.raises(UsageError, match="ranks need a key"):
        e.from_environment({"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)})


def test_a_key_that_others_can_read_is_refused(hosts: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(KEY)
    given = {"MLX_RANK": "0", "MLX_HOSTFILE": str(hosts), "OUTCORE_LINK_KEY_FILE": str(key)}
    for mode in (0o640, 0o604, 0o620):
        key.chmod(mode)
        with pytest.raises(UsageError, match="others can read it, or write to it"):
            e.from_environment(given)
    key.chmod(0o600)
    assert e._key(given) == KEY.encode()


def test_two_ranks_meet_by_their_environments(tmp_path: Path) -> None:
    ports = []
    for _ in range(2):
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            ports.append(sock.getsockname()[1])
    addresses = json.dumps([[f"127.0.0.1:{port}"] for port in ports])
    given = {e.ADDRESSES: addresses, e.KEY: KEY, e.NAMES: '["left", "right"]'}
    own = [given | {e.RANK: str(rank), "OTHER": "stays"} for rank in range(2)]
    links = in_threads([partial(e.from_environment, environment, QUICK, leave=None) for environment in own])
    assert all(isinstance(link, SocketLink) for link in links), links
    # What a rank starts is no rank.
    assert own == [{"OTHER": "stays"}] * 2
    assert [link.host for link in links] == ["left", "right"]
    in_threads([link.close for link in links])


def free_ports(count: int) -> str:
    """The first of ports in a row that nobody has, for mlx.launch, which counts from there.

    Below those that a kernel hands out by itself (32768 and above on Linux, RFC 6335's 49152 elsewhere): a connection
    of any other program may take one of those at any time.
    """
    for first in random.SystemRandom().sample(range(20000, 32000, count), 100):
        with contextlib.ExitStack() as held, contextlib.suppress(OSError):
            for port in range(first, first + count):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
            return str(first)
    raise AssertionError("no ports in a row are free")


def test_mlx_launch_starts_ranks_that_meet() -> None:
    done = subprocess.run(
        [str(LAUNCH), "--backend", "ring", "-n", "3", "-p", free_ports(3), "--", sys.executable, str(TOY), "2"],
        env=os.environ | {e.KEY: KEY},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "round 0\nround 1\n"), done.stderr


def test_ranks_of_mlx_launch_do_not_outlive_it() -> None:
    launcher = subprocess.Popen(
        [str(LAUNCH), "--backend", "ring", "-n", "2", "-p", free_ports(2), "--", sys.executable, str(TOY), "1000000"],
        env=os.environ | {e.KEY: KEY},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert launcher.stdout is not None
    while launcher.stdout.readline() != "round 3\n":
        assert launcher.poll() is None
    ranks = psutil.Process(launcher.pid).children(recursive=True)
    assert len(ranks) == 2
    launcher.kill()
    _, alive = psutil.wait_procs(ranks, timeout=30)
    for rank in alive:
        rank.kill()
    assert not alive
    launcher.wait()
    launcher.stdout.close()


def test_mlx_distributed_carries_ranks_where_its_backend_is_named(tmp_path: Path) -> None:
    """Two ranks on MLX's ring: messages of 3 MB round it, values that come before and between them."""
    first = int(free_ports(2))
    (tmp_path / "hosts").write_text(json.dumps([[f"127.0.0.1:{first + rank}"] for rank in range(2)]))
    given = os.environ | {"MLX_HOSTFILE": str(tmp_path / "hosts"), e.BACKEND: "ring"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(TOY), "4", "3000000", "--say-pids"],
            env=given | {e.RANK: str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=60)[0].splitlines() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert said == [[f"pids {ranks[0].pid} {ranks[1].pid}", *(f"round {n}" for n in range(4))], []]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(UsageError, match=r"mx\.distributed, nonsense: "):
        e.from_environment({e.RANK: "0", e.BACKEND: "nonsense"})
