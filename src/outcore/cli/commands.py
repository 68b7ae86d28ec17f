"""The commands by name: the core's own, and those of packages around it.

A package brings commands, and flags for commands of others, with a module of the group ``commands``
(``outcore.packages``). It is light (``outcore --help`` imports it) and has

- ``COMMANDS``: names and their ``Command``;
- ``FLAGS``, optional: names of commands, and for each ``"module:function"`` that adds flags to its parser. What is done
  with them: ``parser.run = "module:function"`` has the command run that instead, which may call what stood there;
  ``parser.fill`` is called with the parsed flags first; it may fill in others, and set ``args.preset``: messages, a
  template, stop strings and options of a text that no flag says.
- ``RANK``, optional, of one package: the module with ``as_rank`` that is used where a launcher says that this process
  is one rank of several.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from ..packages import modules
from .parser import ArgumentParser


@dataclass(frozen=True)
class Command:
    """A command; nothing of it is imported before it is asked for.

    Attributes:
        help: what it is for, in a line.
        flags: ``"module:function"`` that returns its parser; imports no MLX.
        run: ``"module:function"`` that does it, given the parsed flags; returns the exit status, or None for 0.
        extra: the extra that it needs beyond the core's dependencies.
        launcher: it works in processes that it starts, which choose their own GPU and are quiet by themselves.
    """

    help: str
    flags: str
    run: str
    extra: str | None = None
    launcher: bool = False


_PARSERS = f"{__package__}.parsers:core_parser"

_HELP = {
    "generate": "answer a prompt",
    "chat": "converse with a model; earlier turns are kept, not computed again",
    "serve": "answer clients of OpenAI's, Anthropic's and Ollama's APIs",
    "plan": "what to keep in memory at a budget, how fast that will be, and speed against memory",
    "info": "layers, sizes, and what would be resident at a given --memory; loads nothing",
    "list": "models in the Hub's cache, and what each would need here",
    "demo": "run the demo model under a budget smaller than its weights, and check it against the resident one",
    "doctor": "check in 20 seconds whether what Outcore relies on holds on this machine",
    "monitor": "what your running Outcore processes do, as they do it",
    "pack": "copy a model into the aligned layout that reads fastest",
    "cache": "what packed copies, drafts and calibrations take: ls, rm, clear",
    "cache-prompt": "compute a prompt once, into a file that generate goes on from; mlx_lm.cache_prompt, streamed",
    "calibrate": "measure this machine: its disk, and how long a model's layers take",
    "completion": "what lets a shell complete commands and flags",
}

CORE = {name: Command(help, _PARSERS, f"{__package__}.{name.replace('-', '_')}:run") for name, help in _HELP.items()}
"""The core's own commands, in the order of use."""


def commands() -> dict[str, Command]:
    """All commands: the core's, then those of packages."""
    found = dict(CORE)
    for package in modules("commands").values():
        found |= {name: command for name, command in package.COMMANDS.items() if name not in CORE}
    return found


def parser_of(name: str) -> ArgumentParser:
    """The parser of a command's flags, those of packages with them; made without importing what the command runs.

    Raises:
        KeyError: there is no such command.
    """
    command = commands()[name]
    make = pkgutil.resolve_name(command.flags)
    parser: ArgumentParser = make(name) if name in CORE else make()
    parser.run = command.run
    for package in modules("commands").values():
        if (add := getattr(package, "FLAGS", {}).get(name)) is not None:
            pkgutil.resolve_name(add)(parser)
    return parser


def rank_module() -> Any:
    """The module by which a command is one rank of several; None: no package has one."""
    names = [package.RANK for package in modules("commands").values() if hasattr(package, "RANK")]
    return importlib.import_module(names[0]) if names else None
