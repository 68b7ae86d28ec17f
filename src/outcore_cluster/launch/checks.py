"""What must be the same on all hosts before a run: versions, and the model."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from typing import Any

from outcore.errors import LinkError
from outcore.machine.settings import setting

from .facts import ABSENT, ORIGINAL, PACKED
from .processes import Rank, RankProcesses

VERSIONS = ("outcore", "mlx", "mlx-lm")
CHECK_S = 60.0
"""Seconds in which a host must have looked at the model: headers and blocks, from a cold disk."""


def check_versions(ranks: RankProcesses, ready: Sequence[dict[str, Any]]) -> None:
    """All hosts must compute the same, with the same programs.

    Raises:
        LinkError: names the host, and what it has.
    """
    first = ready[0]["versions"]
    for rank, answer in zip(ranks.ranks, ready, strict=True):
        for name in VERSIONS:
            if (there := answer["versions"][name]) != first[name]:
                raise LinkError(
                    f"{rank.who} has {name} {there}, {ranks.ranks[0].who} {first[name]}: install the same on all hosts",
                    rank.number,
                )


def check_models(ranks: RankProcesses, command: argparse.Namespace, python: str) -> None:
    """All hosts must have the same model, if the command is about one.

    Raises:
        LinkError: names the host, and what is wrong with its copy.
    """
    name = getattr(command, "model", None)
    if (named := getattr(command, "models_named", None)) is not None:
        # ``serve`` takes several, and refuses them over several machines.
        name = next(iter([*named, *(name or [])]), None)
    if name is None and (settled := setting("model")) is not None:
        name = settled.value
    names = [rank.host.model or name for rank in ranks.ranks]
    if None in names:
        return
    revision = getattr(command, "revision", None)
    for rank, there in zip(ranks.ranks, names, strict=True):
        more = [str(revision)] if revision else []
        rank.say(check=[python, "-m", "outcore_cluster.launch.facts", str(there), *more])
    answers = zip(ranks.ranks, ranks.await_all("checked", CHECK_S), strict=True)
    compare([(rank, _facts(rank, text)) for rank, text in answers], list(map(str, names)))


def _facts(rank: Rank, text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text)
    except ValueError:
        facts = None
    if not isinstance(facts, dict):
        raise LinkError(
            f"{rank.who} cannot look at the model: {'; '.join(rank.errors) or 'it says nothing'}", rank.number
        )
    return facts


def compare(found: Sequence[tuple[Rank, dict[str, Any]]], names: Sequence[str]) -> None:
    """Refuse models that differ.

    Args:
        names: the model as each rank is told it.

    Raises:
        LinkError: names the host, and what is wrong with its copy.
    """
    for (rank, facts), name in zip(found, names, strict=True):
        if "error" in facts:
            what = "; copy the model's folder there"
            if rank.number == 0:  # rather misspelt than not copied
                what = "; check the path, or name a Hub model" if facts["error"] == ABSENT else ""
            error = facts["error"] if name in facts["error"] else f"{name}: {facts['error']}"
            raise LinkError(f"{rank.who}: {error}{what}", rank.number)
        if facts.get("absent"):
            logging.getLogger("outcore").warning("%s: %s is not there yet, and will be fetched", rank.who, name)
    for what in ("digest", ORIGINAL, PACKED):
        # Of a packed copy and an original ranks compare the weights when they meet (``outcore_cluster.folders``).
        there = [(rank, name, f[what]) for (rank, f), name in zip(found, names, strict=True) if what in f]
        for rank, name, value in there:
            if value != there[0][2]:
                raise LinkError(
                    f"{rank.who}: {name}: its files differ from those of {there[0][0].who}; copy the folder from "
                    "there, tokenizer and configuration too",
                    rank.number,
                )
