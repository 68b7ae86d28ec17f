"""The parser of every command's flags: what is wrong is one line and not the list of all flags, and help that cannot be
written is an error."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from ..errors import UsageError


class Parser(argparse.ArgumentParser):
    """``argparse.ArgumentParser`` whose errors are Outcore's own."""

    def error(self, message: str) -> NoReturn:
        """Refuse.

        Raises:
            UsageError: always.
        """
        raise UsageError(f"{message}; {self.prog} --help lists what there is")

    def print_help(self, file: Any = None) -> None:
        """Write the help; argparse's own swallows errors."""
        print(self.format_help(), end="", file=file)
