"""What is printed in columns and colours."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from ..text import shown


class PlainConsole(Console):
    """A console that shows text as it is: names of models and files may hold brackets and colons, and what would move a
    terminal's cursor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(markup=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Any text that is printed, in the cell of a table too."""
        return super().render_str(shown(text), **options)
