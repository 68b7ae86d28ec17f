"""The table of commands: the core's own, and those that packages add.

A package adds commands and flags with a module of the entry point group ``outcore.commands``. ``outcore --help``
imports that module, so it must be light. It defines

- ``COMMANDS``: a dictionary of ``Command`` by name;
- ``FLAGS`` (optional): by command name, ``"module:function"``. The function adds flags to the command's parser. To act
  on them it sets ``parser.run``, the function that the command then runs instead, or ``parser.fill``, which is called
  with the parsed flags and may change them and ``args.preset``;
- ``RANK`` (optional, one package only): the module whose ``as_rank`` runs a command as one rank of several.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

from ..packages import modules
from .parser import ArgumentParser

RANKS = "MLX_RANK", "OMPI_COMM_WORLD_RANK"
"""Environment variables that ``outcore launch`` and ``mlx.launch`` set for a process that is one rank of several."""

TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"
"""Environment variable that is set when standard input carries lines typed at a launcher's terminal."""

RUN, LOOK, KEEP = "run a model", "look at models, processes and this machine", "manage files on this machine"
KINDS = (RUN, LOOK, KEEP, "measure", "several machines")


@dataclass(frozen=True)
class Command:
    """Describes a command. Nothing that the command needs is imported until it runs.

    Attributes:
        about: what the command does; ``outcore --help`` shows the first sentence.
        run: ``"module:function"`` to call with the parsed flags. The function returns the exit status, or None for 0.
        flags: ``"module:NAME"`` of a list in the order of the help, of flags and of names of shared flags
            (``cli/flags.py``), separated by spaces. The module must not import MLX.
        example: arguments that make up a whole command line.
        kind: the heading in ``outcore --help``.
        common: names of the flags that ``--help`` shows, while ``--help-all`` shows all; empty: ``--help`` shows all.
        needs_model: without a model on the command line, the configured one is used (``machine.settings``).
        alone: ``"module:function"`` to call before the command is imported, in a process that runs nothing else.
        extra: the pip extra that the command needs.
        launcher: the command runs others in child processes, which choose a GPU and handle ``--quiet`` themselves.
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
        first = self.about.partition(". ")[0].removesuffix(".")
        return first[0].lower() + first[1:]


HUB = "mlx-community/Qwen3-8B-4bit"

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
        "Chat with a model; earlier turns are cached, not computed again. Type h for help. Piped input is one message "
        "per line.",
        common=f"{_COMMON} session context prefix-cache max-kv-size adapter-path json quiet",
    ),
    _core(
        "serve",
        "Serve a model through the APIs of OpenAI, Anthropic and Ollama. Requests that run at the same time share each "
        "pass over the weights. Drafts are used when one request runs, or when they speed up several. Flags are those "
        "of mlx_lm.server where it has them.",
        common="model host port api-key-file max-tokens temp top-p decode-concurrency context prefix-cache memory "
        "draft adapter-path json quiet",
    ),
    _core(
        "cache-prompt",
        "Compute a prompt once and save its cache to a file. outcore generate and mlx_lm.generate continue from it "
        "with --prompt-cache-file.",
        " -p 'A text' --prompt-cache-file text.safetensors",
    ),
    _core(
        "plan",
        "Predict speed and memory for a budget, without loading the model. Lists what the memory is used for, and the "
        "speed of every budget from the smallest to all layers resident. The first run measures this machine, which "
        "takes up to a minute.",
        kind=LOOK,
    ),
])  # fmt: skip


def commands() -> dict[str, Command]:
    """Returns all commands, ordered by kind; the core's come first in each."""
    found = dict(CORE)
    for package in modules("commands").values():
        found |= {name: command for name, command in package.COMMANDS.items() if name not in CORE}
    kinds = [*KINDS, *(command.kind for command in found.values())]
    return dict(sorted(found.items(), key=lambda item: kinds.index(item[1].kind)))


def parser_of(name: str, *, everything: bool = False) -> ArgumentParser:
    """Builds a command's parser, with the flags that packages add, without importing what the command runs.

    Args:
        everything: have the help show all flags, as ``--help-all`` does.

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
        parser.hint = "; flags of the launched command go after its name"
    for package in modules("commands").values():
        if (add := getattr(package, "FLAGS", {}).get(name)) is not None:
            pkgutil.resolve_name(add)(parser)
    if command.common and not everything:
        parser.show_only(f"help help-all {command.common}".split())
    return parser


def rank_module() -> Any:
    """Returns the module that runs a command as one rank of several; None if no package has one."""
    names = [package.RANK for package in modules("commands").values() if hasattr(package, "RANK")]
    return importlib.import_module(names[0]) if names else None
