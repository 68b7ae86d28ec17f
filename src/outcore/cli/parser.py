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

    @property
    def name(self) -> str:
        """The first of them, without dashes."""
        return self.names[0].lstrip("-")

    def but(self, *names: str, group: str | None = None, **changes: Any) -> Flag:
        """The same with other settings, as one command has it; names are further ones."""
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
    """A flag of these names, with a space between them; its type is its default's, unless that is None."""
    if type is None and not isinstance(default, str | bool | tuple | None):
        type = default.__class__
    return Flag(tuple(names.split()), "", {"help": help, "default": default, "type": type} | settings)


def switch(names: str, help: str) -> Flag:
    """A flag without a value."""
    return Flag(tuple(names.split()), "", {"help": help, "action": "store_true"})


def grouped(group: str, *flags: Flag) -> list[Flag]:
    return [each.but(group=group) for each in flags]


class ArgumentParser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` whose errors are Outcore's own.

    Args:
        example: a whole command line behind the program's name, shown below the flags.

    Attributes:
        hint: what is said of a flag that is none.
        run: ``"module:function"`` that the command runs with its flags.
        fill: fills in what no flag says, by a flag that a package brought; returns what, by its name in the parsed
            flags, and where it was said.
    """

    def __init__(self, prog: str, description: str, example: str) -> None:
        super().__init__(prog=prog, description=description)
        self.example = f"{prog} {example}"
        self.hint, self.run = "", ""
        self.fill: Callable[[ArgumentParser, argparse.Namespace], dict[str, Setting]] | None = None
        self._groups: dict[str, argparse._ActionsContainer] = {"": self}
        # ``--memory -5MB`` is a value, which says for itself what is wrong with it; argparse would take it for a flag.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def add(self, flag: Flag) -> None:
        if flag.group not in self._groups:
            self._groups[flag.group] = self.add_argument_group(flag.group)
        self._groups[flag.group].add_argument(*flag.names, **flag.arguments())

    def show_only(self, names: Collection[str]) -> None:
        """Have the help show these flags alone."""
        for action in self._actions:
            if action.option_strings and not {f"--{name}" for name in names} & set(action.option_strings):
                action.help = argparse.SUPPRESS

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

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')}; {self.prog} --help lists what there is")

    def format_help(self) -> str:
        return f"{super().format_help()}\nexample:\n  {self.example}\n"

    def print_help(self, file: Any = None) -> None:
        """Write the help; argparse's own swallows errors."""
        print(self.format_help(), end="", file=file)

    def _unknown(self, word: str) -> str:
        if not word.startswith("-"):
            prompt = "; a prompt goes after --prompt" if "--prompt" in self._option_string_actions else ""
            return f"{shortened(word)!r} is not expected here{prompt}"
        flag = word.partition("=")[0]
        return f"no flag {shortened(flag)}{meant(flag, self._option_string_actions)}{self.hint}"
