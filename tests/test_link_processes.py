"""Ranks that are processes: what is killed, stopped or never comes ends all of them, in time and with a reason."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil  # type: ignore[import-untyped]
import pytest

TOY = Path(__file__).parent / "support" / "link_toy.py"
ENDS_S = 60.0


class Ranks:
    """Processes of the toy, one a rank."""

    def __init__(self, size: int, folder: Path, *words: str, start_s: int = 8) -> None:
        self.size, self.folder, self.words, self.start_s = size, folder, words, start_s
        with contextlib.ExitStack() as held:
            sockets = [held.enter_context(socket.socket()) for _ in range(size)]
            for sock in sockets:
                sock.bind(("127.0.0.1", 0))
            places = [f"127.0.0.1:{sock.getsockname()[1]}" for sock in sockets]
        (folder / "hosts.json").write_text(json.dumps([[place] for place in places]))
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def environment(self, rank: int) -> dict[str, str]:
        return {
            **os.environ,
            "MLX_RANK": str(rank),
            "MLX_HOSTFILE": str(self.folder / "hosts.json"),
            "OUTCORE_LINK_KEY": "0123456789abcdef" * 2,
            "OUTCORE_LINK_START_S": str(self.start_s),
            "OUTCORE_LINK_NAMES": json.dumps([f"host{n}" for n in range(self.size)]),
        }

    def start(self, rank: int, **changes: str) -> None:
        self.processes[rank] = subprocess.Popen(
            [sys.executable, str(TOY), *self.words],
            env=self.environment(rank) | changes,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def rounds(self, at_least: int) -> None:
        out = self._stream(0)
        while (line := out.readline()) and not line.startswith(f"round {at_least}"):
            pass
        assert line, self.processes[0].stderr.read() if self.processes[0].stderr else ""

    def _stream(self, rank: int) -> IO[str]:
        stream = self.processes[rank].stdout
        assert stream is not None
        return stream

    def ended(self, *but: int) -> dict[int, tuple[int, str]]:
        """Status and errors of all ranks but some; each in time."""
        end, found = time.monotonic() + ENDS_S, {}
        for rank, process in self.processes.items():
            if rank not in but:
                _, errors = process.communicate(timeout=max(0.01, end - time.monotonic()))
                found[rank] = process.returncode, errors.strip()
        return found


@pytest.fixture
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    size, *words = request.param
    made = Ranks(size, tmp_path, *words)
    yield made
    for process in made.processes.values():
        process.kill()
        process.communicate()


def toy(size: int, *words: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("ranks", [(size, *words)], indirect=True, ids=["toy"])


@toy(3, "50", "300000")
def test_ranks_that_nothing_happens_to_end_well(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.start(rank)
    assert ranks.ended() == dict.fromkeys(range(3), (0, ""))


@toy(3, "1000000")
@pytest.mark.parametrize(("sign", "victim"), [(signal.SIGKILL, 2), (signal.SIGSTOP, 0)])
def test_a_rank_that_is_killed_or_stopped_ends_all_and_is_named(
    ranks: Ranks, sign: signal.Signals, victim: int
) -> None:
    for rank in range(3):
        ranks.start(rank)
    ranks.rounds(20)
    ranks.processes[victim].send_signal(sign)
    for status, errors in ranks.ended(victim).values():
        assert status == 1
        why = "silent for 5 s" if sign == signal.SIGSTOP else "its process has ended, or its connection broke"
        assert errors == f"toy: rank {victim} (host{victim}): {why}"


@toy(3, "1000000", "--sit", "1")
def test_a_process_ends_though_its_main_thread_sits_in_a_call(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.start(rank)
    ranks.rounds(0)
    ranks.processes[2].kill()
    ended = ranks.ended(2)
    assert ended[0] == (1, "toy: rank 2 (host2): its process has ended, or its connection broke")
    assert ended[1] == (1, "outcore: rank 2 (host2): its process has ended, or its connection broke")


@toy(3, "1000000", "--sit", "1")
def test_a_main_thread_that_does_nothing_though_it_is_due_is_found_out(ranks: Ranks) -> None:
    for rank in range(3):
        ranks.start(rank, OUTCORE_LINK_STALL_S="3")
    ranks.rounds(0)  # a busy machine may take long to start them
    for status, errors in ranks.ended().values():
        assert status == 1
        assert re.search(r"rank 1 \(host1\): has done nothing for \d+ s, while rank 2 waits for it", errors)


@toy(3, "1")
def test_a_rank_that_never_comes_is_named(ranks: Ranks) -> None:
    ranks.start_s = 6
    ranks.start(0)
    ranks.start(1)
    for status, errors in ranks.ended().values():
        assert (status, errors) == (1, "toy: rank 2 (host2) did not come within 6 s of the start")


@toy(3, "1")
def test_a_rank_with_a_wrong_key_gets_an_error(ranks: Ranks) -> None:
    ranks.start_s = 4
    ranks.start(0)
    ranks.start(1, OUTCORE_LINK_KEY="another key altogether")
    ranks.start(2)
    ended = ranks.ended()
    assert ended[1] == (1, "toy: rank 0 (host0) did not come within 4 s of the start: it hung up: it has another key")
    assert ended[0][0] == 1
    assert ended[0][1].startswith("toy: rank 1 (host1) did not come within 4 s of the start; last refused: 127.0.0.1: ")
    assert ended[2][0] == 1


STARTER = """
import json, subprocess, sys, time
ranks = [subprocess.Popen(command, env=environment) for command, environment in json.loads(sys.argv[1])]
time.sleep(100)
"""


@toy(2, "1000000")
def test_ranks_do_not_outlive_what_started_them(ranks: Ranks) -> None:
    commands = [([sys.executable, str(TOY), *ranks.words], ranks.environment(rank)) for rank in range(2)]
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, json.dumps(commands)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    ranks.processes[0] = starter
    ranks.rounds(10)
    started = psutil.Process(starter.pid).children()
    assert len(started) == 2
    starter.kill()
    _, alive = psutil.wait_procs(started, timeout=ENDS_S)
    assert not alive
    assert "what started it is gone" in starter.communicate()[1]


@toy(2, "1000000", "--sit", "0")
def test_a_rank_that_waits_takes_no_processor_time(ranks: Ranks) -> None:
    for rank in range(2):
        ranks.start(rank)
    waiting = psutil.Process(ranks.processes[1].pid)
    end = time.monotonic() + 60
    while True:  # until it has begun to wait
        began, before = time.monotonic(), sum(waiting.cpu_times()[:2])
        time.sleep(2.0)
        if sum(waiting.cpu_times()[:2]) - before <= 0.05 * (time.monotonic() - began):
            break
        assert began < end
    assert waiting.is_running() and waiting.status() != psutil.STATUS_ZOMBIE
