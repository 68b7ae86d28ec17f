"""``outcore launch``: a command on several machines at once, each a rank of it.

On every host a guard is started (``outcore_cluster.launch.guard``), here as a child and elsewhere through ssh. It tells
its versions, and starts the rank. The run's key goes to it over its standard input and on through a pipe, so that no
list of processes shows it.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import queue
import secrets
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from outcore.cli.commands import TYPED_ELSEWHERE
from outcore.cli.output import spinner
from outcore.errors import LinkError, UsageError
from outcore.text import meant, printable, shortened, unmoved

from .as_rank import check_command
from .guard import PACKAGES
from .hosts import Host, find_hosts, remote_command, variable_of
from .processes import Rank, RankProcesses, how

READY_S = 20.0
"""Seconds until a host's guard must have answered, from a cold disk too."""
START_S = 7
"""Seconds in which all ranks must have found each other; their guards run by then."""
TWICE_S = 3.0
"""Seconds after a Ctrl-C in which another one means that all is to end."""
LINES_SHOWN = 5
"""Last lines of a rank that failed."""


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 if all ranks ended so.

    Raises:
        UsageError: hosts or the command cannot be meant.
        LinkError: a host cannot be reached, has other versions or another model, or a rank failed.
        KeyboardInterrupt: somebody pressed Ctrl-C, and the ranks ended.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    # A path is a program of its own, of which nothing is known.
    args.program = bool(words) and "/" in words[0]
    inner = None if args.program else _command(words)
    hosts = find_hosts(args.hosts, args.hostfile, args.repeat_hosts)
    variables = hosts.variables | dict(map(variable_of, args.env))
    python, head = args.python or sys.executable, hosts.hosts[0]
    # A command that has no JSON prints nothing of it.
    answer: list[str] | None = [] if args.json and hasattr(inner, "json") else None
    asked = ["--json"] if answer is not None else []
    asked += ["--quiet"] if args.quiet and hasattr(inner, "quiet") else []
    command = list(words) if args.program else [python, "-m", "outcore", *words[:1], *asked, *words[1:]]
    events: queue.Queue[Any] = queue.Queue()
    with contextlib.ExitStack() as stack:
        starting = stack.enter_context(contextlib.ExitStack())
        ranks = RankProcesses(events, partial(_show, args.json, answer, starting))
        typed = os.isatty(0)
        own = _own_streams(args.json, stack) if head.local else None
        stack.enter_context(_interrupts(ranks, typed and head.local))
        if not args.quiet and not args.program:
            starting.enter_context(spinner("starting" if head.local else f"waiting for {printable(head.name)}"))
        stack.callback(ranks.end)
        for number, host in enumerate(hosts.hosts):
            streams = own if number == 0 else None
            with _held(ranks):
                ranks.ranks.append(rank := _guarded(args, number, host, python, events, streams, typed))
            more = {TYPED_ELSEWHERE: "1"} if number == 0 and own is None and typed else {}
            order = {"command": command, "environment": variables | more, "directory": args.cwd, "host": host.address}
            rank.say(start=order | ({"terminal": streams} if streams is not None else {}))
        ready = ranks.await_ready(READY_S)
        check_versions(ranks, ready)
        if head.local:
            starting.close()  # from here on it says itself what it does
        _go(ranks, [each["port"] for each in ready])
        if not head.local:
            threading.Thread(target=_read_input, args=(events,), daemon=True).start()
        with _terminations(ranks) if words[:1] == ["serve"] else contextlib.nullcontext():
            ranks.run()
    args.result.record |= _document(answer)
    return _status(ranks, args)


def _own_streams(as_json: bool, stack: contextlib.ExitStack) -> list[int]:
    """This process's standard streams, to be handed on to a first rank here. With JSON, its output goes through its
    guard, whose descriptor that is."""
    found = []
    for fd in (0, 2) if as_json else (0, 1, 2):
        try:
            # Beyond the descriptors that a child's own streams take.
            found.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        except OSError:
            found.append(os.open(os.devnull, os.O_RDWR))  # it is closed
        stack.callback(os.close, found[-1])
    return [found[0], 1, found[1]] if as_json else found


def _read_input(events: queue.Queue[Any]) -> None:
    """Lines of standard input, as events for the rank that wants them."""
    for line in sys.stdin:
        events.put((-1, {"input": line}))
    events.put((-1, {"input_end": 1}))


def _document(answer: list[str] | None) -> dict[str, Any]:
    """What the first rank printed with ``--json``; nothing where it was ended before it told."""
    for line in reversed("".join(answer or ()).splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def _command(words: Sequence[str]) -> argparse.Namespace:
    """The command that ranks run, checked here before anything is started anywhere."""
    from outcore.cli.commands import commands, parser_of

    if words and words[0] not in commands():
        raise UsageError(
            f"no command {shortened(words[0])!r}{meant(words[0], commands())}; outcore --help lists what there is"
        )
    if not words or words[0] == "launch":
        raise UsageError("give what to run behind --: outcore launch --hosts a,b -- generate --model ...")
    inner = parser_of(words[0]).parse_args(list(words[1:]))
    check_command(words[0], inner)
    return inner


def check_versions(ranks: RankProcesses, ready: Sequence[dict[str, Any]]) -> None:
    """All hosts must compute the same, with the same programs.

    Raises:
        LinkError: names the host, and what it has.
    """
    first = ready[0]["versions"]
    for rank, answer in zip(ranks.ranks, ready, strict=True):
        for name in PACKAGES:
            if (there := answer["versions"][name]) != first[name]:
                raise LinkError(
                    f"{rank.who} has {name} {there}, {ranks.ranks[0].who} {first[name]}: install the same on all hosts",
                    rank.number,
                )


def _guarded(
    args: argparse.Namespace,
    number: int,
    host: Host,
    python: str,
    events: queue.Queue[Any],
    own: list[int] | None,
    typed: bool,
) -> Rank:
    command = [python, "-m", "outcore_cluster.launch.guard"]
    if not host.local:
        command = remote_command(args.ssh, host.name, args.cwd or str(Path.cwd()), python)
    pipe = subprocess.PIPE
    try:
        guard = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            pass_fds=[fd for fd in own or () if fd > 2],
            # What reads from a terminal must be of its foreground.
            start_new_session=own is None or not typed,
        )
    except OSError as e:
        raise LinkError(f"rank {number} ({host.name}): {shlex.join(command[:1])}: {e.strerror}", number) from e
    return Rank(number, host, guard, events)


def _go(ranks: RankProcesses, ports: Sequence[int]) -> None:
    addresses = [
        [f"[{rank.host.address}]:{port}" if ":" in rank.host.address else f"{rank.host.address}:{port}"]
        for rank, port in zip(ranks.ranks, ports, strict=True)
    ]
    names = [rank.host.name for rank in ranks.ranks]
    run = {"addresses": addresses, "names": names, "key": secrets.token_hex(32), "run": secrets.token_hex(4)}
    ranks.begun = True
    where = ["local" if rank.host.local else rank.host.name for rank in ranks.ranks]
    for n, rank in enumerate(ranks.ranks):
        place, there = where[:n].count(where[n]), where.count(where[n])
        rank.say(go={**run, "rank": n, "start_s": START_S, "place": place, "there": there})


def _show(as_json: bool, answer: list[str] | None, starting: contextlib.ExitStack, stream: str, text: str) -> None:
    """What rank 0 says through its guard, here; the first word of it ends the sign of life."""
    starting.close()
    if answer is not None and stream == "out":
        answer.append(text)
        return
    to = sys.stdout if stream == "out" and not as_json else sys.stderr
    to.write(unmoved(text) if to.isatty() else text)
    to.flush()


@contextlib.contextmanager
def _interrupts(ranks: RankProcesses, by_terminal: bool) -> Iterator[None]:
    """Ctrl-C is rank 0's: it ends, and the others with it, or goes on, as ``chat`` does. A second within ``TWICE_S``
    ends all at once; one before there are ranks, too.

    Args:
        by_terminal: the terminal sends it to rank 0 itself.
    """

    def interrupted(_: int, __: FrameType | None) -> None:
        now = time.monotonic()
        if not ranks.begun:
            ranks.interrupted_at = now
            if ranks.held:
                return
            raise KeyboardInterrupt  # no rank is there yet that could be told
        ranks.at_once = ranks.interrupted_at is not None and now - ranks.interrupted_at < TWICE_S
        ranks.interrupted_at = now
        if not by_terminal and ranks.ranks:
            ranks.ranks[0].say(interrupt=1)

    with _handled(signal.SIGINT, interrupted):
        yield


@contextlib.contextmanager
def _handled(number: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@contextlib.contextmanager
def _held(ranks: RankProcesses) -> Iterator[None]:
    """A guard is started: Ctrl-C waits until it is known, and will be ended."""
    ranks.held = True
    try:
        yield
    finally:
        ranks.held = False
    if ranks.interrupted_at is not None:
        raise KeyboardInterrupt


def _terminations(ranks: RankProcesses) -> contextlib.AbstractContextManager[None]:
    """SIGTERM is rank 0's, too, of a command that ends well by it."""

    def terminated(_: int, __: FrameType | None) -> None:
        ranks.terminated = True
        ranks.ranks[0].say(terminate=1)

    return _handled(signal.SIGTERM, terminated)


def _named(rank: Rank, ranks: RankProcesses) -> Rank:
    """Whose fault a rank's end is, by what it said last: another one's, or its own."""
    said = next(iter(list(rank.lines)[-1:]), "")
    return next((each for each in ranks.ranks if each is not rank and f" {each.who}: " in said), rank)


def _status(ranks: RankProcesses, args: argparse.Namespace) -> int:
    args.result.record["launch"] = {
        "ranks": [{"rank": r.number, "host": r.host.name, "exit_status": r.ended} for r in ranks.ranks],
        "failed": ranks.failed.number if ranks.failed is not None else None,
    }
    bad, head = [rank for rank in ranks.ranks if rank.ended != 0], ranks.ranks[0]
    if not bad:
        return 0
    if ranks.interrupted_at is not None:
        raise KeyboardInterrupt
    if ranks.terminated and head.ended == -signal.SIGTERM:
        # It had not come so far as to end well by it; nor has this.
        signal.raise_signal(signal.SIGTERM)
    if all(rank.ended == 2 for rank in ranks.ranks):
        return 2
    first = ranks.failed or bad[0]
    told = _named(first, ranks) is head or "error" in args.result.record
    if head.ended in (1, 2) and not args.program and told:
        return head.ended  # it has told why, where this would
    # Who has heard of it may have ended before whose fault it is.
    by_itself = [rank for rank in bad if rank.ended is not None and rank.ended > 0]
    for rank in dict.fromkeys((first, *(rank for rank in by_itself if _named(rank, ranks) is rank))):
        for line in list(rank.lines)[-LINES_SHOWN:]:
            print(f"{rank.who}: {line}", file=sys.stderr)
    # What a first rank here says goes past this: one that ended after another had failed has heard of it.
    unheard = [r for r in by_itself if _named(r, ranks) is not first and not (r is head and head.host.local)]
    if not args.program and first.ended == 2 and all(rank.ended == 2 for rank in (first, *unheard)):
        # Others are slower to see what was asked for wrongly, and were ended before they had.
        what = next(iter(list(first.lines)[-1:]), "").partition(": ")[2]
        args.result.record |= {"error": what, "type": "UsageError", "exit_status": 2}
        return 2
    culprit = _named(first, ranks)
    raise LinkError(f"{culprit.who} {how(culprit.ended)}", culprit.number)
