"""The parser of every command's flags: what is wrong is one line and not the list of all flags, and help that cannot be
written is an error."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ..errors import UsageError
from ..text import meant, shortened
from .preset import Preset

if TYPE_CHECKING:
    from ..machine.settings import Setting


LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


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
        """The flags; ``argv`` is what they were read from.

        Raises:
            UsageError: they cannot be meant.
        """
        words = list(sys.argv[1:] if args is None else args)
        parsed, rest = self.parse_known_args(words, namespace)
        if rest:
            self.error(self._unknown(rest[0]))
        parsed.argv, parsed.preset = words, Preset()
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
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message.removeprefix('argument ')}; {self.prog} --help lists what there is")

    def format_help(self, *, everything: bool = False) -> str:
        """The help of the common flags, or of all, with the example below it."""
        hidden = self._shown and not everything
        flags = [a for a in self._actions if a.option_strings and hidden]
        rare = [a for a in flags if not self._shown & set(a.option_strings)]
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
