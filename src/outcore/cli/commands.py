"""The table of commands: the core's own, and those that packages add.

A package adds commands and flags with a module of the entry point group ``outcore.commands``. ``outcore --help``
imports that module, so it must be light. It defines

- ``COMMANDS``: a dictionary of ``Command`` by name;
- ``FLAGS`` (optional): by command name, ``"module:function"``. The function adds flags to the command's parser. To act
  on them it sets ``parser.run``, the function that the command then runs instead, or ``parser.fill``, which is called
  with the parsed flags and may change them and ``args.preset``;
- ``INSTEAD`` (optional): by words that other programs have for commands, what there is instead;
- ``FLAGS_INSTEAD`` (optional): the same for flags, several texts each; the first that names only known flags is shown;
- ``RANK`` (optional, one package only): the module whose ``as_rank`` runs a command as one rank of several.
"""

from __future__ import annotations

import argparse
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UsageError
from ..packages import modules
from ..text import meant, shortened

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper

    from ..machine.settings import Setting
    from ..serve.api import Defaults
    from ..serve.service import ModelService


# Environment variables that ``outcore launch`` and ``mlx.launch`` set for a process that is one rank of several.
RANKS = "MLX_RANK", "OMPI_COMM_WORLD_RANK"

# Environment variable that is set when standard input carries lines typed at a launcher's terminal.
TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"

# What a chat says at the first Ctrl-C while it waits for a message.
LEAVES = "Ctrl-C again, Ctrl-D or /exit leaves"

# Headings of the help, in the order of use.
GET, RUN = "get and choose a model", "run a model"
LOOK, KEEP = "look at what runs, and at this machine", "manage files on this machine"
KINDS = (GET, RUN, LOOK, KEEP, "measure", "several machines")


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
        last: comes last under its heading.
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
    last: bool = False
    launcher: bool = False

    @property
    def help(self) -> str:
        first = self.about.partition(". ")[0].removesuffix(".")
        return first[0].lower() + first[1:]


HUB = "mlx-community/Qwen3-8B-4bit"

_COMMON = "model max-tokens system-prompt temp top-p seed memory draft"


def _core(name: str, about: str, example: str = "", **more: Any) -> tuple[str, Command]:
    run = f"{__package__}.{name}:run" if name != "cache-prompt" else f"{__package__}.generate:cache_prompt"
    flags = f"{__package__}.flags:{name.replace('-', '_').upper()}"
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
        "Chat with a model; earlier turns are cached, not computed again. Type /help for help. Piped input is one "
        "message per line.",
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
        kind=GET,
        last=True,
    ),
])  # fmt: skip


def commands() -> dict[str, Command]:
    found = dict(CORE)
    for package in modules("commands").values():
        found |= {name: command for name, command in package.COMMANDS.items() if name not in CORE}
    kinds = [*KINDS, *(command.kind for command in found.values())]
    return dict(sorted(found.items(), key=lambda item: (kinds.index(item[1].kind), item[1].last)))


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


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Flag:
    """Describes a flag.

    Attributes:
        group: its heading in the help; empty: among the command's own flags.
        settings: arguments of ``add_argument``. The default is added to ``help`` if that does not mention it.
    """

    names: tuple[str, ...]
    group: str
    settings: dict[str, Any]

    @property
    def name(self) -> str:
        return self.names[0].lstrip("-")

    def but(self, *names: str, group: str | None = None, **changes: Any) -> Flag:
        """Returns the flag with further names and other settings, for one command."""
        group = self.group if group is None else group
        return replace(self, names=self.names + names, group=group, settings=self.settings | changes)

    def arguments(self) -> dict[str, Any]:
        settings = {key: value for key, value in self.settings.items() if value is not None}
        text, default = settings.pop("help", ""), settings.get("default")
        if self.names[0].startswith("-") and settings.get("action") != "store_true" and not settings.get("required"):
            shown = "none" if default in (None, "", ()) else default
            text += f" Default: {shown}." if "Default" not in text else ""
        return settings | {"help": text.strip().replace("%", "%%")}


def flag(names: str, help: str, default: Any = None, type: Any = None, **settings: Any) -> Flag:
    """Makes a flag. ``names`` are separated by spaces; without ``type``, the default's type is used."""
    if type is None and not isinstance(default, str | bool | tuple | None):
        type = default.__class__
    return Flag(tuple(names.split()), "", {"help": help, "default": default, "type": type} | settings)


def switch(names: str, help: str) -> Flag:
    return Flag(tuple(names.split()), "", {"help": help, "action": "store_true"})


def grouped(group: str, *flags: Flag) -> list[Flag]:
    return [each.but(group=group) for each in flags]


class ArgumentParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` that raises UsageError.

    Args:
        example: arguments that make up a whole command line, shown below the flags.

    Attributes:
        hint: added to the error about an unknown flag.
        run: ``"module:function"`` that the command runs with the parsed flags.
        fill: set by a package's flag to fill in other flags; returns their values and sources by name.
    """

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(prog=prog, description=description)
        self.example = f"{prog} {example}"
        self.hint, self.run = "", ""
        self.fill: Callable[[ArgumentParser, argparse.Namespace], dict[str, Setting]] | None = None
        self._groups: dict[str, argparse._ActionsContainer] = {"": self}
        # Parses the -5MB of ``--memory -5MB`` as a value, so that the error is about the size, not an unknown flag.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def add(self, flag: Flag) -> None:
        if flag.group not in self._groups:
            self._groups[flag.group] = self.add_argument_group(flag.group)
        self._groups[flag.group].add_argument(*flag.names, **flag.arguments())

    def show_only(self, names: Collection[str]) -> None:
        for action in self._actions:
            if action.option_strings and not {f"--{name}" for name in names} & set(action.option_strings):
                action.help = argparse.SUPPRESS

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parses flags; adds ``argv`` (the words), ``preset``, and ``ranks`` (the machines that share the model)."""
        words = list(sys.argv[1:] if args is None else args)
        parsed, rest = self.parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest[0]))
        parsed.argv, parsed.preset, parsed.ranks = words, Preset(), None
        named = parsed.__dict__.pop("model_named", None)
        if named is not None:
            if parsed.model not in (None, named):
                both = f"{shortened(named)} and --model {shortened(parsed.model)}"
                self.error(f"{both}: give only one model{self._prompt_hint()}")
            parsed.model = named
        return parsed

    def error(self, message: str) -> NoReturn:
        if message.startswith("argument --max-tokens/-m: invalid"):
            message += "; a model goes after --model"
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        return f"{super().format_help()}\nexample:\n  {self.example}\n"

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's own, it does not swallow errors of the stream."""
        print(self.format_help(), end="", file=file)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            return f"{shortened(word)!r} is not expected here{self._prompt_hint()}"
        flag, there = word.partition("=")[0], self._option_string_actions
        texts = [text for text in _instead(flag) if there.keys() >= {*re.findall("--[a-z-]+", text)}]
        hint = f"; {texts[0]}" if texts and texts[0] not in there else meant(texts[0] if texts else flag, there)
        return f"no flag {shortened(flag)}{hint}{self.hint}"

    def _get_option_tuples(self, option_string: str) -> Any:
        # Another program's flag abbreviates none of ours.
        return [] if _instead(option_string.partition("=")[0]) else super()._get_option_tuples(option_string)

    def _prompt_hint(self) -> str:
        if self.prog == "outcore chat":
            return "; outcore generate MODEL --prompt PROMPT answers one prompt"
        return "; a prompt goes after --prompt" if "--prompt" in self._option_string_actions else ""


def _instead(flag: str) -> Sequence[str]:
    word, packages = flag.lstrip("-").replace("_", "-"), modules("commands").values()
    return [text for package in packages for text in getattr(package, "FLAGS_INSTEAD", {}).get(word, ())]


class Preset:
    """A preset without effect. A package's flag may set ``args.preset`` to a subclass, whose methods raise UsageError
    for flags that contradict it.

    Attributes:
        messages: put before the user's first message, in the form that chat templates take.
        stop: strings that end an answer.
    """

    messages: Sequence[Mapping[str, str]] = ()
    stop: tuple[str, ...] = ()

    def prepare(self, tokenizer: TokenizerWrapper, *, template: bool = True, cached: bool = False) -> None:
        """Checks that the tokenizer fits.

        Args:
            template: whether the command applies a chat template.
            cached: whether a prompt cache holds what the template writes before the question.
        """

    def answer_tokens(self, prompt: int, most: int) -> int:
        """Returns the most tokens of an answer (-1 for no limit) to ``prompt`` tokens; ``most`` is the flag's limit."""
        return most

    def options(self) -> dict[str, Any]:
        return {}

    def defaults(self, defaults: Defaults) -> Defaults:
        return defaults

    def service(self, service: ModelService) -> ModelService:
        """Returns the service that a server uses, which may wrap the given one."""
        return service
