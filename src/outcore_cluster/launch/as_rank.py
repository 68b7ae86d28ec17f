"""A command as one rank of several: what starts it says so (``outcore_cluster.environment``). The first rank
speaks, the others work."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING

from outcore.cli.main import uninterrupted
from outcore.cli.output import Nowhere, Result
from outcore.cli.parser import ArgumentParser
from outcore.errors import LinkError, UsageError
from outcore.text import one_line

if TYPE_CHECKING:
    from outcore_cluster.link.link import Link
    from outcore_cluster.link.socket_link import SocketLink
    from outcore_cluster.mlx_link import MlxLink

RANK = "MLX_RANK"
STARTED_AS_RANK = RANK, "OUTCORE_LINK_BACKEND", "OMPI_COMM_WORLD_SIZE"
RANK_MODEL = "OUTCORE_RANK_MODEL"
"""Where this rank has the model, if not where its command says: ``outcore launch --model-of``."""

COMMANDS = "generate", "chat", "batch", "perplexity", "serve", "plan"
"""That run on several machines."""


def check_command(name: str, args: argparse.Namespace | None = None) -> None:
    """Refuse what would not share a model, before anything is started anywhere.

    Args:
        args: its flags, as far as they are known.

    Raises:
        UsageError: the command is another, or a flag asks for what is not done there.
    """
    if name not in COMMANDS:
        raise UsageError(f"{name}: not over several machines; what is: {', '.join(COMMANDS)}")
    given = vars(args) if args is not None else {}
    prefix = given.get("prefix_cache") or "off"
    draft = str(given.get("draft") or "").partition(":")[0]
    refused = {
        "--kv-disk on": given.get("kv_disk") == "on",
        "--session": given.get("session") is not None,
        # ``chat`` and ``serve`` have it on by themselves, and do without.
        f"--prefix-cache {prefix}": prefix != "off" and (prefix != "on" or name == "generate"),
        f"--draft {given.get('draft')}": draft == "mtp",
        "--device": name == "plan" and given.get("device") is not None,
    }
    for flag, asked in refused.items():
        if asked:
            raise UsageError(f"{flag}: not over several machines; leave it out")


def leave_out(args: argparse.Namespace) -> None:
    """Have off what commands have on by themselves, and is not done over several machines."""
    if getattr(args, "prefix_cache", None) == "on":
        args.prefix_cache = "off"


SAME = (
    "prefill_step_size",
    "dtype",
    "kv_bits",
    "kv_group_size",
    "quantized_kv_start",
    "max_kv_size",
    "kv_eviction",
    "max_tokens",
)
"""Flags that all ranks have to be given alike: they change numbers, or when a text ends, and nobody would see it."""


def check_same(link: Link, command: str, args: argparse.Namespace) -> None:
    """Refuse ranks that were told to do other things; all of them ask at the same time. ``outcore launch`` tells them
    the same.

    Raises:
        UsageError: names the flag, on every rank.
    """
    mine = {"command": command} | {name: getattr(args, name, None) for name in SAME}
    told = [json.loads(each) for each in link.gather(json.dumps(mine).encode())]
    for rank, theirs in enumerate(told):
        for name, value in theirs.items():
            if value != told[0][name]:
                flag = name if name == "command" else f"--{name.replace('_', '-')}"
                first = told[0][name]
                said, others = (v if v is not None else "nothing" for v in (value, first))
                raise UsageError(f"{flag}: {said} on rank {rank}, {others} on rank 0; give all ranks the same")


def find_own_model(args: argparse.Namespace, environment: MutableMapping[str, str] = os.environ) -> None:
    """Put the model's place on this host, where it has one of its own, into a rank's flags."""
    own = environment.pop(RANK_MODEL, None)
    if own is not None and RANK in environment and hasattr(args, "model"):
        several = getattr(args, "models_named", None)
        if several is None:
            args.model = own
        elif len([*several, *(args.model or [])]) < 2:  # others are refused by ``serve`` itself
            args.models_named, args.model = [own], None


@contextmanager
def as_rank(parser: ArgumentParser, args: argparse.Namespace, result: Result) -> Iterator[bool]:
    """Meet the other ranks, if there are any and the command runs a model; ``args.ranks`` is what ``load`` is told.

    Yields whether this process tells anything. What ends one rank ends all.

    Raises:
        UsageError: the environment cannot be meant. LinkError: a rank did not come.
    """
    args.ranks, name = None, parser.prog.rpartition(" ")[2]
    link = _link() if any(group.title == "engine" for group in parser._action_groups) else None
    if link is None:
        yield True
        return
    check_command(name, args)
    # MLX's own modules, interrupted while they are made, fail to be.
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


def _link(environment: Mapping[str, str] = os.environ) -> SocketLink | MlxLink | None:
    # Few runs have ranks, and sockets and their like take 40 ms to import.
    if not any(name in environment for name in STARTED_AS_RANK):
        return None
    from ..environment import from_environment

    return from_environment()
