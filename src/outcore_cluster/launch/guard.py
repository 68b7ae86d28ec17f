"""``python -m outcore_cluster.launch.guard``: starts one rank on its host, and ends it when the launcher is gone.

The guard is a child of ``outcore launch``, or of ssh on another host; the rank is the guard's child. First the guard
writes one line of JSON with its port and versions; the rank's own output follows. It reads lines of JSON, one object
each: start (command, environment, directory, host, terminal), go (rank, addresses, ...), input, input_end, interrupt,
terminate, beat. Its exit status is the rank's, or 128 + n if signal n ended the rank.

If its input ends, or is silent for ``SILENCE_S``, the launcher is gone or stopped: the guard then ends the rank and the
rank's children, by SIGKILL if need be. If the guard itself is killed, the rank's link notices that its parent has
changed, and ends the rank.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.machine.gpus import VISIBLE, nvidia_gpus
from outcore.machine.settings import SHARED_BY
from outcore.text import one_line

from .. import environment as names

SILENCE_S = 5.0
# Seconds between SIGTERM and SIGKILL.
TERM_S = 0.5
POLL_S = 0.1
# Most seconds that a signal waits until the rank has the input before it.
ORDER_S = 0.5
# Packages of which all hosts must have the same version.
PACKAGES = ("outcore", "mlx", "mlx-lm")


class RankGuard:
    def __init__(self) -> None:
        self._order: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._rank: subprocess.Popen[bytes] | None = None
        self._input: queue.Queue[bytes | None] = queue.Queue()

    def run(self) -> int:
        held, heard_at = b"", time.monotonic()
        moved_at = heard_at
        while time.monotonic() - heard_at < SILENCE_S:
            if select.select([0], [], [], POLL_S)[0]:
                if not (data := os.read(0, 1 << 16)):
                    return 1
                heard_at = time.monotonic()
                *lines, held = (held + data).split(b"\n")
                for line in lines:
                    self._obey(json.loads(line))
            if self._rank is None:
                continue
            if (status := self._rank.poll()) is not None:
                return status if status >= 0 else 128 - status
            if not is_stopped(self._rank.pid):
                moved_at = time.monotonic()
            elif time.monotonic() - moved_at > SILENCE_S:
                raise OSError(f"has been suspended for {SILENCE_S:.0f} s")
        return 1

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._order = order["start"]
            directory = self._order["directory"]
            if directory is not None and not Path(directory).is_dir():
                raise OSError(f"--cwd {directory}: there is no such folder on this host")
            # Listens before the rank runs, so that ranks that are faster wait instead of being refused.
            family, _, _, _, place = socket.getaddrinfo(self._order["host"], 0, type=socket.SOCK_STREAM)[0]
            self._listener = socket.create_server(place[:2], family=family, backlog=64)
            print(
                json.dumps(
                    {"port": self._listener.getsockname()[1], "versions": {name: version(name) for name in PACKAGES}}
                ),
                flush=True,
            )
        elif "go" in order:
            self._go(order["go"])
        elif "input" in order:
            self._input.put(order["input"].encode())
        elif "input_end" in order:
            self._input.put(None)
        elif self._rank is not None:
            for word, number in (("interrupt", signal.SIGINT), ("terminate", signal.SIGTERM)):
                if word in order:
                    # After the lines typed before it; a rank may be too busy to take them.
                    end = time.monotonic() + ORDER_S
                    while self._input.unfinished_tasks and time.monotonic() < end:
                        time.sleep(0.01)
                    self._rank.send_signal(number)

    def _go(self, run: dict[str, Any]) -> None:
        assert self._listener is not None
        key, write = os.pipe()
        os.write(write, run["key"].encode())
        os.close(write)
        variables = {
            names.RANK: str(run["rank"]),
            names.ADDRESSES: json.dumps(run["addresses"]),
            names.NAMES: json.dumps(run["names"]),
            names.RUN: run["run"],
            names.START_S: str(run["start_s"]),
            names.FD: str(self._listener.fileno()),
            names.KEY_FD: str(key),
            names.PARENT: str(os.getpid()),
        }
        environment = {**os.environ, **self._order["environment"], **variables}
        # Only rank 0 reads the user's input; it sends it to the others.
        terminal = self._order.get("terminal")
        own = [subprocess.DEVNULL if run["rank"] else subprocess.PIPE, None, None]
        try:
            self._rank = subprocess.Popen(
                self._order["command"],
                env=on_host(environment, run["place"], run["there"]),
                cwd=self._order["directory"],
                pass_fds=(self._listener.fileno(), key),
                start_new_session=terminal is None,
                **dict(zip(("stdin", "stdout", "stderr"), terminal or own, strict=True)),
            )
        finally:
            self._listener.close()
            os.close(key)
        if self._rank.stdin is not None:
            threading.Thread(target=self._feed, args=(self._rank.stdin,), daemon=True).start()

    def _feed(self, stdin: Any) -> None:
        with contextlib.suppress(OSError), stdin:
            while (data := self._input.get()) is not None:
                stdin.write(data)
                stdin.flush()
                self._input.task_done()
            self._input.task_done()

    def end(self) -> None:
        rank = self._rank
        if rank is None:
            return
        children: list[psutil.Process] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(rank.pid).children(recursive=True) if rank.poll() is None else []
        if rank.poll() is None and not is_stopped(rank.pid):
            rank.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(TERM_S)
        if rank.poll() is None:
            rank.kill()
        # The rank began a process group; kill the processes that are left in it.
        if self._order.get("terminal") is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        rank.wait()


def on_host(environment: dict[str, str], place: int, there: int) -> dict[str, str]:
    """Returns the environment for the ``place``-th of ``there`` ranks on a host: each has a GPU to itself if there are
    enough, else a part of the memory."""
    gpus = nvidia_gpus(environment)
    if len(gpus) > 1:
        environment = environment | {VISIBLE: gpus[place % len(gpus)]}
    each = -(-there // max(1, len(gpus)))
    return environment if each < 2 else environment | {SHARED_BY: str(each)}


def is_stopped(pid: int) -> bool:
    """Whether a signal such as SIGSTOP has stopped a process; then only SIGKILL ends it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def main() -> int:
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
        # The launcher handles these. Not SIG_IGN, which the rank would inherit.
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    guard = RankGuard()
    try:
        return guard.run()
    except (OSError, ValueError, LookupError) as e:
        print(one_line(e), file=sys.stderr)
        return 1
    finally:
        guard.end()


if __name__ == "__main__":
    sys.exit(main())
