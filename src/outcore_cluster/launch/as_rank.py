"""Runs a command as one rank of several if the environment says so (``outcore_cluster.environment``). Only rank 0
prints."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from outcore.cli.commands import ArgumentParser
from outcore.cli.main import uninterrupted
from outcore.cli.output import Nowhere, Result
from outcore.errors import LinkError, UsageError
from outcore.text import one_line

from ..environment import from_environment
from ..link_protocol import Link

COMMANDS = "generate", "chat", "batch", "perplexity", "serve", "plan"


def check_command(name: str, args: argparse.Namespace | None = None) -> None:
    """Raises ``UsageError`` if the command, or one of its flags in ``args``, does not work over several machines."""
    if name not in COMMANDS:
        raise UsageError(f"{name}: does not work over several machines; commands that run there: {', '.join(COMMANDS)}")
    given = vars(args) if args is not None else {}
    prefix = given.get("prefix_cache") or "off"
    draft = str(given.get("draft") or "").partition(":")[0]
    refused = {
        "--kv-disk on": given.get("kv_disk") == "on",
        "--exact-batch": bool(given.get("exact_batch")),
        "--session": given.get("session") is not None,
        # On by default in ``chat`` and ``serve``; ``leave_out`` turns it off.
        f"--prefix-cache {prefix}": prefix != "off" and (prefix != "on" or name == "generate"),
        f"--draft {given.get('draft')}": draft == "mtp",
        "--device": name == "plan" and given.get("device") is not None,
    }
    for flag, asked in refused.items():
        if asked:
            raise UsageError(f"{flag}: does not work over several machines; leave it out")


def leave_out(args: argparse.Namespace) -> None:
    """Turns off features that are on by default and do not work over several machines."""
    if getattr(args, "prefix_cache", None) == "on":
        args.prefix_cache = "off"


# Flags that must be equal on all ranks: otherwise results would differ unnoticed.
SAME = (
    "prefill_step_size",
    "dtype",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "max_kv_size",
    "max_tokens",
)


def check_same(link: Link, command: str, args: argparse.Namespace) -> None:
    """Raises ``UsageError`` on all ranks if their commands or flags differ. All ranks call it at the same time."""
    mine = {"command": command} | {f"--{name.replace('_', '-')}": getattr(args, name, None) for name in SAME}
    gathered = [json.loads(each) for each in link.gather(json.dumps(mine).encode())]
    for name in mine:
        if len({json.dumps(each[name]) for each in gathered}) > 1:
            raise UsageError(
                f"{name}: {[each[name] for each in gathered]} on ranks 0 to {link.size - 1}; give each the same"
            )


@contextmanager
def as_rank(parser: ArgumentParser, args: argparse.Namespace, result: Result) -> Iterator[bool]:
    """Connects to the other ranks if there are any and the command runs a model. Sets ``args.ranks``, for ``load``.

    Yields whether this process prints. An exception on one rank ends all ranks.

    Raises:
        UsageError: the environment is invalid. LinkError: a rank did not connect in time.
    """
    args.ranks, name, link = None, parser.prog.rpartition(" ")[2], None
    if any(group.title == "engine" for group in parser._action_groups):
        link = from_environment()
    if link is None:
        yield True
        return
    check_command(name, args)
    # Ctrl-C during the import of MLX's modules would leave them broken.
    with uninterrupted():
        from ..group import RankGroup

    args.ranks = RankGroup(link, host=link.host)
    leave_out(args)
    if name == "plan":
        parser.run = "outcore_cluster.launch.plan:run"
    speaks = link.rank == 0
    try:
        check_same(link, name, args)
        if speaks:
            yield True
        else:
            result.wanted = False
            with redirect_stdout(Nowhere()):
                yield False
    except BaseException as e:
        if not isinstance(e, LinkError):
            link.fail("interrupted" if isinstance(e, KeyboardInterrupt) else one_line(e))
        raise
    finally:
        link.close()
