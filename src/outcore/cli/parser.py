"""The argument parser of all commands, whose errors are one line. Imports no MLX, which takes a second."""

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
        # Takes the -5MB of ``--memory -5MB`` for a value, which is refused as such, and not for a flag.
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
                self.error(f"{shortened(named)} and --model {shortened(parsed.model)}: give only one model")
            parsed.model = named
        return parsed

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; see {self.prog} --help")

    def format_help(self) -> str:
        return f"{super().format_help()}\nexample:\n  {self.example}\n"

    def print_help(self, file: Any = None) -> None:
        """Prints the help; unlike argparse's own, it does not swallow errors of the stream."""
        print(self.format_help(), end="", file=file)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            prompt = "; a prompt goes after --prompt" if "--prompt" in self._option_string_actions else ""
            return f"{shortened(word)!r} is not expected here{prompt}"
        flag = word.partition("=")[0]
        return f"no flag {shortened(flag)}{meant(flag, self._option_string_actions)}{self.hint}"
