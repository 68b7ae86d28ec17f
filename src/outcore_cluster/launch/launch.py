"""``outcore launch``: runs a command on several machines at once, each as one rank.

The launcher starts a guard (``outcore_cluster.launch.guard``) for every rank: a child here, through ssh on other hosts.
The guard reports its versions and starts the rank. It gets the run's key on its standard input and passes it on through
a pipe, so that no list of processes shows the key.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import json
import os
import secrets
import signal
import sys
import threading
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from outcore.cli.commands import TYPED_ELSEWHERE
from outcore.cli.output import spinner
from outcore.errors import LinkError, UsageError
from outcore.text import meant, printable, shortened, unmoved

from .as_rank import check_command
from .guard import PACKAGES
from .hosts import Host, find_hosts, remote_command, variable_of
from .processes import Rank, RankProcesses, how

# Seconds within which every guard must report, even if Python is read from a cold disk.
READY_S = 20.0
# Seconds within which all ranks must be connected, counted from when all guards run.
START_S = 7
# Seconds within which a second Ctrl-C ends all ranks at once.
TWICE_S = 3.0
# Last lines shown of a rank that failed.
LINES_SHOWN = 5


def run(args: argparse.Namespace) -> int:
    """Runs the command on all hosts. Returns 0 if all ranks did.

    Raises:
        UsageError: the hosts or the command are invalid.
        LinkError: a host cannot be reached, has other versions or another model, or a rank failed.
        KeyboardInterrupt: Ctrl-C was pressed, and the ranks have ended.
    """
    words = args.words[1:] if args.words[:1] == ["--"] else args.words
    # A word with "/" is the path of the user's own program, whose flags are unknown.
    args.program, args.serves = bool(words) and "/" in words[0], words[:1] == ["serve"]
    inner = None if args.program else _command(words)
    hosts = find_hosts(args.hosts, args.hostfile, args.repeat_hosts)
    variables = hosts.variables | dict(map(variable_of, args.env))
    # Some commands have no --json.
    answer: list[str] | None = [] if args.json and hasattr(inner, "json") else None
    asked = ["--json"] if answer is not None else []
    asked += ["--quiet"] if args.quiet and hasattr(inner, "quiet") else []
    python = args.python or sys.executable
    command = list(words) if args.program else [python, "-m", "outcore", *words[:1], *asked, *words[1:]]
    order = {"command": command, "environment": variables, "directory": args.cwd}
    with contextlib.ExitStack() as starting:
        ranks = RankProcesses(partial(_show, args.json, answer, starting))
        try:
            asyncio.run(_run(args, hosts.hosts, python, order, ranks, starting))
        except asyncio.CancelledError:
            raise KeyboardInterrupt from None
    args.result.record |= _document(answer)
    return _status(ranks, args)


async def _run(
    args: argparse.Namespace,
    hosts: Sequence[Host],
    python: str,
    order: dict[str, Any],
    ranks: RankProcesses,
    starting: contextlib.ExitStack,
) -> None:
    """Starts a guard for each host and has it start a rank (``order``). Returns when all ranks have ended."""
    typed, head = os.isatty(0), hosts[0]
    _hear_interrupts(ranks, typed and head.local)
    with contextlib.ExitStack() as stack:
        streams = _own_streams(args.json, stack) if head.local else None
        if not args.quiet and not args.program:
            starting.enter_context(spinner("starting" if head.local else f"waiting for {printable(head.name)}"))
        try:
            for host in hosts:
                own = None if ranks.ranks else streams
                guard = [python, "-m", "outcore_cluster.launch.guard"]
                if not host.local:
                    guard = remote_command(args.ssh, host.name, args.cwd or str(Path.cwd()), python)
                # A process that reads from a terminal must be in its foreground group.
                handed_on = [fd for fd in own or () if fd > 2]
                rank = await ranks.start(host, guard, pass_fds=handed_on, start_new_session=own is None or not typed)
                its = {**order, "host": host.address} | ({"terminal": own} if own is not None else {})
                if rank.number == 0 and own is None and typed:
                    its["environment"] = order["environment"] | {TYPED_ELSEWHERE: "1"}
                rank.say(start=its)
            await ranks.await_ready(READY_S)
            check_versions(ranks.ranks)
            if head.local:
                starting.close()  # rank 0 shows its own progress
            _go(ranks)
            if args.serves:
                asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ranks.terminate)
            if not head.local:
                reading = threading.Thread(target=_read_input, args=(asyncio.get_running_loop(), ranks.ranks[0]))
                reading.daemon = True
                reading.start()
            await ranks.run()
        finally:
            await ranks.end()


def _own_streams(as_json: bool, stack: contextlib.ExitStack) -> list[int]:
    """Returns copies of this process's standard streams, for rank 0 if it runs on this machine. With JSON, standard
    output is the guard's instead, so that this process can read it."""
    found = []
    for fd in (0, 2) if as_json else (0, 1, 2):
        try:
            # 10 or higher: lower ones may be replaced in the child.
            found.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10))
        except OSError:
            found.append(os.open(os.devnull, os.O_RDWR))  # this stream is closed
        stack.callback(os.close, found[-1])
    return [found[0], 1, found[1]] if as_json else found


def _read_input(loop: asyncio.AbstractEventLoop, rank: Rank) -> None:
    with contextlib.suppress(RuntimeError):  # the loop is closed: all ranks have ended
        for line in sys.stdin:
            loop.call_soon_threadsafe(partial(rank.say, input=line))
        loop.call_soon_threadsafe(partial(rank.say, input_end=1))


def _document(answer: list[str] | None) -> dict[str, Any]:
    """Returns the object that rank 0 printed with ``--json``; empty if rank 0 was ended before."""
    for line in reversed("".join(answer or ()).splitlines()):
        with contextlib.suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return {}


def _command(words: Sequence[str]) -> argparse.Namespace:
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


def check_versions(ranks: Sequence[Rank]) -> None:
    """Raises ``LinkError`` if two hosts have different versions."""
    first = ranks[0].ready["versions"]
    for rank in ranks:
        for name in PACKAGES:
            if (there := rank.ready["versions"][name]) != first[name]:
                raise LinkError(
                    f"{rank.who} has {name} {there}, {ranks[0].who} {first[name]}: install the same on all hosts",
                    rank.number,
                )


def _go(ranks: RankProcesses) -> None:
    addresses = [
        [f"[{host}]:{rank.ready['port']}" if ":" in (host := rank.host.address) else f"{host}:{rank.ready['port']}"]
        for rank in ranks.ranks
    ]
    names = [rank.host.name for rank in ranks.ranks]
    run = {"addresses": addresses, "names": names, "key": secrets.token_hex(32), "run": secrets.token_hex(4)}
    ranks.begun = True
    where = ["local" if rank.host.local else rank.host.name for rank in ranks.ranks]
    for n, rank in enumerate(ranks.ranks):
        place, there = where[:n].count(where[n]), where.count(where[n])
        rank.say(go={**run, "rank": n, "start_s": START_S, "place": place, "there": there})


def _show(as_json: bool, answer: list[str] | None, starting: contextlib.ExitStack, stream: str, text: str) -> None:
    """Shows rank 0's output, which came through its guard. The first text ends the spinner."""
    starting.close()
    if answer is not None and stream == "out":
        answer.append(text)
        return
    to = sys.stdout if stream == "out" and not as_json else sys.stderr
    to.write(unmoved(text) if to.isatty() else text)
    to.flush()


def _hear_interrupts(ranks: RankProcesses, by_terminal: bool) -> None:
    """Passes Ctrl-C to rank 0, unless the terminal already did. Rank 0 then ends (and all ranks with it) or goes on
    (``chat``). A second one within ``TWICE_S`` ends all ranks at once; one before any rank has started ends the
    launcher."""
    this = asyncio.current_task()
    assert this is not None

    def interrupted() -> None:
        now, before = time.monotonic(), ranks.interrupted_at
        ranks.interrupted_at = now
        if not ranks.begun:
            this.cancel()  # no rank has started
            return
        ranks.at_once = before is not None and now - before < TWICE_S
        ranks.wake()
        if not by_terminal:
            ranks.ranks[0].say(interrupt=1)

    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, interrupted)


def _named(rank: Rank, ranks: RankProcesses) -> Rank:
    """If the last line of a failed rank's output names another rank, returns that rank, else the failed one."""
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
        # SIGTERM ended rank 0 before rank 0 could handle it; end this process by SIGTERM, too.
        signal.raise_signal(signal.SIGTERM)
    if all(rank.ended == 2 for rank in ranks.ranks):
        return 2
    first = ranks.failed or bad[0]
    told = _named(first, ranks) is head or "error" in args.result.record
    if head.ended in (1, 2) and not args.program and told:
        return head.ended  # rank 0 has printed the reason
    # A rank that reports another rank's fault may have ended before that rank.
    by_itself = [rank for rank in bad if rank.ended is not None and rank.ended > 0]
    for rank in dict.fromkeys((first, *(rank for rank in by_itself if _named(rank, ranks) is rank))):
        for line in list(rank.lines)[-LINES_SHOWN:]:
            print(f"{rank.who}: {line}", file=sys.stderr)
    # Rank 0 on this host writes to the terminal, not to the launcher: what it said of the fault is unknown here.
    unheard = [r for r in by_itself if _named(r, ranks) is not first and not (r is head and head.host.local)]
    if not args.program and first.ended == 2 and all(rank.ended == 2 for rank in (first, *unheard)):
        # The command is wrong on all ranks; slower ones were ended before they could report it.
        what = next(iter(list(first.lines)[-1:]), "").partition(": ")[2]
        args.result.record |= {"error": what, "type": "UsageError", "exit_status": 2}
        return 2
    culprit = _named(first, ranks)
    raise LinkError(f"{culprit.who} {how(culprit.ended)}", culprit.number)
