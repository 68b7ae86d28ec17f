"""The parser of every command's flags: what is wrong is one line and not the list of all flags, and help that cannot be
written is an error. Imports no MLX, which takes a second."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UsageError
from ..text import meant, shortened
from .preset import Preset

if TYPE_CHECKING:
    from ..machine.settings import Setting


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


@dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
        names: as they are given, the one that help shows first.
        group: under which help lists it; empty: beside the command's own.
        settings: arguments of ``add_argument``. Where ``help`` does not end with the default, that is added.
    """

    names: tuple[str, ...]
    group: str
    settings: dict[str, Any]

    def but(self, *names: str, group: str | None = None, **changes: Any) -> Flag:
        """The same with other settings, as one command has it; names are further ones."""
        group = self.group if group is None else group
        return replace(self, names=self.names + names, group=group, settings=self.settings | changes)

    def add(self, to: argparse._ActionsContainer) -> None:
        """Put it into a parser or a group."""
        settings = {key: value for key, value in self.settings.items() if value is not None}
        text, default = settings.pop("help", ""), settings.get("default")
        if self.names[0].startswith("-") and settings.get("action") != "store_true" and not settings.get("required"):
            shown = "none" if default in (None, "", ()) else default
            text += f" Default: {shown}." if "Default" not in text else ""
        to.add_argument(*self.names, help=text.strip().replace("%", "%%"), **settings)


def flag(names: str, help: str, default: Any = None, type: Any = None, **settings: Any) -> Flag:
    """A flag of these names, with a space between them; its type is its default's, unless that is None."""
    if type is None and not isinstance(default, str | bool | tuple | None):
        type = default.__class__
    return Flag(tuple(names.split()), "", {"help": help, "default": default, "type": type} | settings)


def switch(names: str, help: str) -> Flag:
    """A flag without a value."""
    return Flag(tuple(names.split()), "", {"help": help, "action": "store_true"})


def grouped(group: str, *flags: Flag) -> list[Flag]:
    """Flags in a group of the help."""
    return [each.but(group=group) for each in flags]


class _HelpAll(argparse._HelpAction):
    """``--help-all``."""

    def __call__(self, parser: Any, *_: Any, **__: Any) -> None:
        print(parser.format_help(everything=True), end="")
        parser.exit()


class ArgumentParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` whose errors are Outcore's own.

    Args:
        example: a whole command line, shown below the flags.

    Attributes:
        hint: what is said of a flag that is none.
        needs_model: whether the command works on a model, so that without one it takes the one that is settled
            (``machine.settings``).
        runs_model: whether it has the engine's flags, so that it takes the budget that is settled.
        run: ``"module:function"`` that the command runs with its flags.
        fill: fills in what no flag says, by a flag that a package brought; returns what, by its name in the parsed
            flags, and where it was said.
    """

    def __init__(self, *, example: str | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.example = example
        self.hint, self.run = "", ""
        self.needs_model = self.runs_model = False
        self.fill: Callable[[ArgumentParser, argparse.Namespace], dict[str, Setting]] | None = None
        self._shown: set[str] = set()
        # ``--memory -5MB`` is a value, which says for itself what is wrong with it; argparse would take it for a flag.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def show_only(self, common: Collection[str]) -> None:
        """Have ``--help`` show these flags alone, and ``--help-all`` all of them; of no names: all."""
        if common:
            self.add_argument("--help-all", action=_HelpAll, help="show all flags and exit")
            self._shown = {f"--{name}" for name in common} | {"--help", "--help-all"}

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """The flags; ``argv`` is what they were read from, ``ranks`` are machines that share the model."""
        words = list(sys.argv[1:] if args is None else args)
        parsed, rest = self.parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest[0]))
        parsed.argv, parsed.preset, parsed.ranks = words, Preset(), None
        named = parsed.__dict__.pop("model_named", None)
        if named is not None:
            if parsed.model not in (None, named):
                self.error(f"{shortened(named)} and --model {shortened(parsed.model)}: give one model")
            parsed.model = named
        return parsed

    def given(self, words: Sequence[str]) -> set[str]:
        """The names of what is given in a command line that ``parse_args`` has taken, and does not have its default."""
        defaults = [(action, action.default) for action in self._actions]
        try:
            for action, _ in defaults:
                action.default = argparse.SUPPRESS
            found = vars(self.parse_known_args(list(words))[0])
        finally:
            for action, default in defaults:
                action.default = default
        return {"model" if name == "model_named" else name for name in found}

    def error(self, message: str) -> NoReturn:
        """Refuse."""
        raise UsageError(f"{message.removeprefix('argument ')}; {self.prog} --help lists what there is")

    def format_help(self, *, everything: bool = False) -> str:
        """The help of the common flags, or of all, with the example below it."""
        hidden = self._shown and not everything
        rare = [a for a in self._actions if hidden and a.option_strings and not self._shown & set(a.option_strings)]
        helps = [action.help for action in rare]
        try:
            for action in rare:
                action.help = argparse.SUPPRESS
            text = super().format_help()
        finally:
            for action, help in zip(rare, helps, strict=True):
                action.help = help
        return text + (f"\nexample:\n  {self.example}\n" if self.example else "")

    def print_help(self, file: Any = None) -> None:
        """Write the help; argparse's own swallows errors."""
        print(self.format_help(), end="", file=file)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            prompt = "; a prompt goes after --prompt" if "--prompt" in self._option_string_actions else ""
            return f"{shortened(word)!r} is not expected here{prompt}"
        flag = word.partition("=")[0]
        return f"no flag {shortened(flag)}{meant(flag, self._option_string_actions)}{self.hint}"
