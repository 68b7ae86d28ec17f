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

RANKS = "MLX_RANK", "OMPI_COMM_WORLD_RANK"
"""Variables that ``outcore launch`` and ``mlx.launch`` set where a command is one rank of several."""

TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"
"""Set where standard input is lines that somebody types at a launcher elsewhere."""

RUN, LOOK, KEEP = "run a model", "look at models, processes and this machine", "what is kept on this machine"
KINDS = (RUN, LOOK, KEEP, "measure", "several machines")
"""Headings of ``outcore --help``, in their order; those of packages may be others."""


@dataclass(frozen=True)
class Command:
    """A command; nothing that it runs is imported before it is asked for.

    Attributes:
        about: what it does. ``outcore --help`` shows the first sentence.
        run: ``"module:function"`` that does it, given the parsed flags; returns the exit status, or None for 0.
        flags: ``"module:NAME"`` of a list: flags in the order of the help, and names of shared ones with spaces between
            them (``cli/flags.py``). It imports no MLX.
        example: what a whole command line gives it.
        kind: under which heading ``outcore --help`` lists it.
        common: names of the flags that ``--help`` shows; ``--help-all`` shows the others, too. Empty: all.
        needs_model: where none is given, it takes the model that is settled (``machine.settings``).
        alone: ``"module:function"`` that is called before anything is imported, in a process that does nothing else.
        extra: the extra that it needs beyond the core's dependencies.
        launcher: it runs commands in processes that it starts, which choose their own GPU and are quiet by themselves.
    """

    about: str
    run: str
    flags: str
    example: str = ""
    kind: str = RUN
    common: str = ""
    needs_model: bool = True
    alone: str | None = None
    extra: str | None = None
    launcher: bool = False

    @property
    def help(self) -> str:
        """What it does, in a line."""
        first = self.about.partition(". ")[0].removesuffix(".")
        return first[0].lower() + first[1:]


HUB = "mlx-community/Qwen3-8B-4bit"
"""The model of examples."""

_COMMON = "model max-tokens system-prompt temp top-p seed memory draft"


def _core(name: str, about: str, example: str = "", **more: Any) -> tuple[str, Command]:
    module = name.replace("-", "_")
    run, flags = f"{__package__}.{module}:run", f"{__package__}.core_flags:{module.upper()}"
    return name, Command(about, run, flags, f"{HUB} --memory 4GB{example}", **more)


CORE = dict([
    _core(
        "generate",
        "Answer a prompt.",
        " --prompt 'Why is the sky blue?'",
        common=f"{_COMMON} prompt prefix-cache max-kv-size kv-bits adapter-path json quiet",
    ),
    _core(
        "chat",
        "Converse with a model; earlier turns are kept, not computed again. h shows what can be typed. What is piped "
        "in is a message a line.",
        common=f"{_COMMON} session context prefix-cache max-kv-size adapter-path json quiet",
    ),
    _core(
        "serve",
        "Answer clients of OpenAI's, Anthropic's and Ollama's APIs. Requests share each sweep over the weights; one "
        "alone has drafts, several where these pay. Flags are those of mlx_lm.server where it has them.",
        common="model host port api-key-file max-tokens temp top-p decode-concurrency context prefix-cache memory "
        "draft adapter-path json quiet",
    ),
    _core(
        "cache-prompt",
        "Compute a prompt once, into a file that generate goes on from. So does mlx_lm.generate, with "
        "--prompt-cache-file.",
        " -p 'A text' --prompt-cache-file text.safetensors",
    ),
    _core(
        "plan",
        "What a budget keeps in memory, how fast that is, and speed against memory. What it takes is told item by "
        "item, and the speed from the smallest budget to everything resident. Loads nothing. The first time, this "
        "machine is measured, which takes up to a minute.",
        kind=LOOK,
    ),
])  # fmt: skip
"""The core's own commands."""


def commands() -> dict[str, Command]:
    """All commands in the order of use: by kind, and the core's first in each."""
    found = dict(CORE)
    for package in modules("commands").values():
        found |= {name: command for name, command in package.COMMANDS.items() if name not in CORE}
    kinds = [*KINDS, *(command.kind for command in found.values())]
    return dict(sorted(found.items(), key=lambda item: kinds.index(item[1].kind)))


def parser_of(name: str, *, everything: bool = False) -> ArgumentParser:
    """The parser of a command's flags, those of packages with them; made without importing what the command runs.

    Args:
        everything: its help shows the flags that few use, too.

    Raises:
        KeyError: there is no such command.
    """
    from .flags import named

    command = commands()[name]
    parser = ArgumentParser(f"outcore {name}", command.about, command.example)
    parser.run = command.run
    if command.common:
        parser.add_argument("--help-all", action="help", help="show all flags and exit")
    for each in named(pkgutil.resolve_name(command.flags)):
        parser.add(each)
    if command.launcher:
        parser.hint = "; the command's own flags come behind its name"
    for package in modules("commands").values():
        if (add := getattr(package, "FLAGS", {}).get(name)) is not None:
            pkgutil.resolve_name(add)(parser)
    if command.common and not everything:
        parser.show_only(f"help help-all {command.common}".split())
    return parser


def rank_module() -> Any:
    """The module by which a command is one rank of several; None: no package has one."""
    names = [package.RANK for package in modules("commands").values() if hasattr(package, "RANK")]
    return importlib.import_module(names[0]) if names else None
