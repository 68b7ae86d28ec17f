"""``python -m outcore_cluster.link.guard``: starts one rank on its host, and ends it when the launcher is gone.

It stands between ``outcore launch``, at the other end of its standard streams (through ssh, where the host is another),
and the rank, its child. Both sides write lines of JSON, one object each:

    launcher → guard   start (command, environment, directory, host, terminal), go (rank, addresses, ...),
                       input, input_end, interrupt, terminate, beat
    guard → launcher   ready (port, versions), out, err, ended (status), refused (why), beat (and whether the
                       rank is stopped)

The end of its input, and ``SILENCE_S`` without a line, mean that the launcher is gone or stopped: the rank and its
children are ended then, by SIGKILL if need be. Should the guard itself be killed, Linux kills the rank; elsewhere the
rank sees that its parent is another.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from outcore.machine.gpus import VISIBLE, nvidia_gpus
from outcore.machine.settings import SHARED_BY
from outcore.text import one_line

from . import environment as names

BEAT_S = 1.0
SILENCE_S = 5.0
TERM_S = 0.5
"""Seconds between asking a rank to end and ending it."""
MOST_HELD = 1 << 18
"""Bytes for the launcher beyond which the rank's output is left in its pipes."""
PACKAGES = ("outcore", "mlx", "mlx-lm")


class RankGuard:
    """The guard of one rank.

    Args:
        take, give: descriptors that lines come from and go to.
    """

    def __init__(self, take: int, give: int) -> None:
        self._take, self._give = take, give
        for fd in (take, give):
            os.set_blocking(fd, False)
        self._held, self._leaving = b"", bytearray()
        self._heard_at = time.monotonic()
        self._order: dict[str, Any] = {}
        self._listener: socket.socket | None = None
        self._rank: subprocess.Popen[bytes] | None = None
        self._outputs: dict[int, str] = {}
        self._input = bytearray()
        self._input_ends = False
        self._over = False
        self._ended_at = 0.0

    def run(self) -> int:
        """Guard until the rank has ended, or the launcher has; the exit status."""
        beat = 0.0
        try:
            while not self._over:
                self._turn()
                now = time.monotonic()
                if now >= beat:
                    beat = now + BEAT_S
                    self._say(beat=1, stopped=self._stopped())
                if now - self._heard_at > SILENCE_S:
                    self._over = True
                if self._rank is not None and self._ended(self._rank, now):
                    self._say(ended=self._rank.returncode)
                    self._drain()
                    return 0
        finally:
            self._end_rank()
        return 1

    def _ended(self, rank: subprocess.Popen[bytes], now: float) -> bool:
        """Whether the rank has, and what it wrote is passed on; what it started may hold its streams open."""
        if rank.poll() is None:
            return False
        self._ended_at = self._ended_at or now
        return not self._outputs or now - self._ended_at > BEAT_S

    def _stopped(self) -> bool:
        return self._rank is not None and is_stopped(self._rank.pid)

    def _turn(self) -> None:
        """Wait for anything to do, at most a fifth of a second, and do it."""
        with selectors.DefaultSelector() as waits:
            waits.register(self._take, selectors.EVENT_READ, self._hear)
            if self._leaving:
                waits.register(self._give, selectors.EVENT_WRITE, self._flush)
            if len(self._leaving) < MOST_HELD:
                for fd in self._outputs:
                    waits.register(fd, selectors.EVENT_READ, lambda fd=fd: self._pass_on(fd))
            if self._input and self._rank is not None and self._rank.stdin is not None:
                waits.register(self._rank.stdin.fileno(), selectors.EVENT_WRITE, self._feed)
            for key, _ in waits.select(0.2):
                key.data()

    def _hear(self) -> None:
        try:
            data = os.read(self._take, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._over = True
            return
        self._heard_at = time.monotonic()
        *lines, self._held = (self._held + data).split(b"\n")
        for line in lines:
            try:
                self._obey(json.loads(line))
            except (ValueError, TypeError, LookupError, OSError) as e:
                self._say(refused=one_line(e))

    def _obey(self, order: dict[str, Any]) -> None:
        if "start" in order:
            self._order = order["start"]
            directory = self._order.get("directory")
            if directory is not None and not Path(directory).is_dir():
                self._say(refused=f"--cwd {directory}: there is no such folder on this host")
                return
            self._listener = _listening(self._order["host"])
            self._say(ready={"port": self._listener.getsockname()[1], "versions": versions()})
        elif "go" in order:
            self._go(order["go"])
        elif "input" in order:
            self._input += order["input"].encode()
        elif "input_end" in order:
            self._input_ends = True
            self._feed()
        elif self._rank is not None and self._rank.poll() is None:
            for word, number in (("interrupt", signal.SIGINT), ("terminate", signal.SIGTERM)):
                if word in order:
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
        terminal = self._order.get("terminal")
        # Only the first rank is told what a user types; it tells the others.
        own = [subprocess.DEVNULL if run["rank"] else subprocess.PIPE, subprocess.PIPE, subprocess.PIPE]
        streams = dict(zip(("stdin", "stdout", "stderr"), terminal or own, strict=True))
        try:
            self._rank = subprocess.Popen(
                self._order["command"],
                env=on_host(
                    {**os.environ, **self._order.get("environment", {}), **variables}, run["place"], run["there"]
                ),
                cwd=self._order.get("directory"),
                pass_fds=(self._listener.fileno(), key),
                start_new_session=terminal is None,
                preexec_fn=_dying_with_parent(),
                **streams,
            )
        finally:
            self._listener.close()
            os.close(key)
        for name in ("stdout", "stderr"):
            if (stream := getattr(self._rank, name)) is not None:
                self._outputs[stream.fileno()] = name[3:]
        if self._rank.stdin is not None:
            os.set_blocking(self._rank.stdin.fileno(), False)
            self._feed()

    def _pass_on(self, fd: int) -> None:
        data = os.read(fd, 1 << 15)
        if data:
            self._say(**{self._outputs[fd]: data.decode(errors="backslashreplace")})
        else:
            del self._outputs[fd]

    def _feed(self) -> None:
        if self._rank is None or self._rank.stdin is None:
            return
        with contextlib.suppress(BlockingIOError):
            try:
                del self._input[: os.write(self._rank.stdin.fileno(), self._input)]
            except BrokenPipeError:
                self._input.clear()
        if self._input_ends and not self._input:
            self._rank.stdin.close()
            self._rank.stdin = None

    def _say(self, **what: Any) -> None:
        self._leaving += json.dumps(what).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._leaving:
                del self._leaving[: os.write(self._give, self._leaving)]
        except BlockingIOError:
            pass
        except OSError:
            self._leaving.clear()
            self._over = True

    def _drain(self) -> None:
        end = time.monotonic() + SILENCE_S
        while self._leaving and not self._over and time.monotonic() < end:
            self._turn()

    def _end_rank(self) -> None:
        rank = self._rank
        if rank is None:
            return
        children = below(rank.pid) if rank.poll() is None else []
        if rank.poll() is None and not self._stopped():
            rank.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                rank.wait(TERM_S)
        if rank.poll() is None:
            rank.kill()
        # What it has started may outlive it. A session of its own is a group until its last process has ended.
        if self._order.get("terminal") is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(rank.pid, signal.SIGKILL)
        for process in children:
            with contextlib.suppress(psutil.Error):
                process.kill()
        rank.wait()


def on_host(environment: dict[str, str], place: int, there: int) -> dict[str, str]:
    """The environment of one of several ranks on a host: each has a GPU of its own, as far as there are, or its part of
    the memory.

    Args:
        place: of the rank among those of its host, from 0. there: how many these are.
    """
    gpus = nvidia_gpus(environment)
    if len(gpus) > 1:
        environment = environment | {VISIBLE: gpus[place % len(gpus)]}
    each = -(-there // max(1, len(gpus)))
    return environment if each < 2 else environment | {SHARED_BY: str(each)}


def is_stopped(pid: int) -> bool:
    """Whether a process is, by a signal: it hears nothing, and only SIGKILL ends it."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def below(pid: int) -> list[psutil.Process]:
    """What a process has started, and what that has."""
    try:
        return list(psutil.Process(pid).children(recursive=True))
    except psutil.Error:
        return []


def versions() -> dict[str, str]:
    """What all hosts must have the same of."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


def _listening(host: str) -> socket.socket:
    """A socket that listens at a free port, so that ranks which are faster wait instead of being refused."""
    family, _, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(place)
    sock.listen(64)
    return sock


def _dying_with_parent() -> Callable[[], None] | None:
    """What a child does before it runs anything, so that the system kills it when this process ends; Linux has that."""
    if not sys.platform.startswith("linux"):
        return None
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    set_death_signal, parent = 1, os.getpid()

    def run() -> None:
        prctl(set_death_signal, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return run


def main() -> int:
    """Guard; the launcher alone interrupts the rank."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP):
        # A handler, not SIG_IGN: the rank would inherit that.
        signal.signal(number, lambda *_: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    return RankGuard(0, 1).run()


if __name__ == "__main__":
    sys.exit(main())
