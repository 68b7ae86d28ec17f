"""``outcore completion``: prints a shell's completion script for commands, flags, their values and files."""

from __future__ import annotations

import argparse
from pathlib import Path

import shtab

from outcore.checks import choice
from outcore.cli.commands import commands, parser_of
from outcore.cli.parser import LOG_LEVELS
from outcore.options import LoadOptions

from .flags import ACTIONS, SHELLS

WORDS = {name: each.metadata["words"] for name, each in LoadOptions.__dataclass_fields__.items() if each.metadata}
WORDS |= {"log_level": LOG_LEVELS, "shell": SHELLS, "action": ACTIONS}
"""The values that flags accept. The parsers do not list them as choices, so that errors are Outcore's own."""


def run(args: argparse.Namespace) -> None:
    choice("SHELL", args.shell, SHELLS)
    whole = argparse.ArgumentParser(prog="outcore")
    parsers = whole.add_subparsers()
    for name, command in commands().items():
        own = parser_of(name)
        for action in own._actions:
            if WORDS.get(action.dest) and "," not in str(action.default):
                action.choices = WORDS[action.dest]
            elif action.type is Path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.dest in ("model", "model_named"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        parsers.add_parser(name, help=command.help, parents=[own], add_help=False)
    print(shtab.complete(whole, args.shell))
