"""What must be the same on all hosts before a run: versions, and the model."""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Sequence
from typing import Any

from ..errors import LinkError
from ..system.settings import setting
from .launch_facts import ABSENT
from .launch_ranks import Rank, Ranks

VERSIONS = ("outcore", "mlx", "mlx-lm")
CHECK_S = 60.0
"""Seconds in which a host must have looked at the model: headers and blocks, from a cold disk."""


def check_versions(ranks: Ranks, ready: Sequence[dict[str, Any]]) -> None:
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


def check_models(ranks: Ranks, command: argparse.Namespace, python: str) -> None:
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
    if name is None:
        return
    revision = getattr(command, "revision", None)
    words = [python, "-m", "outcore.cli.launch_facts", str(name), *([str(revision)] if revision else [])]
    for rank in ranks.ranks:
        rank.say(check=words)
    answers = zip(ranks.ranks, ranks.await_all("checked", CHECK_S), strict=True)
    compare([(rank, _facts(rank, text)) for rank, text in answers], name)


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


def compare(found: Sequence[tuple[Rank, dict[str, Any]]], name: str) -> None:
    """Refuse models that differ.

    Raises:
        LinkError: names the host, and what is wrong with its copy.
    """
    for rank, facts in found:
        if "error" in facts:
            what = "; copy the model's folder there"
            if rank.number == 0:  # rather misspelt than not copied
                what = "; check the path, or name a Hub model" if facts["error"] == ABSENT else ""
            error = facts["error"] if name in facts["error"] else f"{name}: {facts['error']}"
            raise LinkError(f"{rank.who}: {error}{what}", rank.number)
        if facts.get("absent"):
            logging.getLogger("outcore").warning("%s: %s is not there yet, and will be fetched", rank.who, name)
    there = [(rank, facts["digest"]) for rank, facts in found if "digest" in facts]
    for rank, digest in there:
        if digest != there[0][1]:
            raise LinkError(
                f"{rank.who}: {name}: its files differ from those of {there[0][0].who}; copy the folder from there, "
                "tokenizer and configuration too",
                rank.number,
            )
