"""What is typed in a terminal: messages of several lines, with a history; and nothing of it into an answer."""

from __future__ import annotations

import os
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.history import FileHistory, History, InMemoryHistory
from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
from prompt_toolkit.output import create_output

from ..errors import StoreError
from ..machine.cache_folder import make_cache

PROMPT, MORE = "> ", ". "

HISTORY = "chat-history"
"""A file in the cache folder, which no ``outcore cache clear`` removes: it cannot be made again."""

_PASTES, _NO_PASTES = "\x1b[?2004h", "\x1b[?2004l"
"""Have the terminal say where what is pasted begins and ends (xterm's bracketed paste); and no longer."""


def typed(on_error: bool) -> Iterator[str]:
    """Messages, one after the other, until the end of input. None is empty.

    Args:
        on_error: standard output is no terminal: the prompt stands on standard error.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(),
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=MORE,
        output=create_output(stdout=sys.stderr) if on_error else None,
    )
    with _unheard():
        while True:
            try:
                text = session.prompt(PROMPT)
            except EOFError:
                return
            if text.strip():
                _tell_terminal(_PASTES)
                try:
                    yield text
                finally:
                    _tell_terminal(_NO_PASTES)


def _keys() -> KeyBindings:
    keys = KeyBindings()

    @keys.add("enter")
    def _(event: KeyPressEvent) -> None:
        buffer = event.current_buffer
        if buffer.document.is_cursor_at_the_end and buffer.text.endswith("\\"):
            buffer.delete_before_cursor()
            buffer.insert_text("\n")
        else:
            buffer.validate_and_handle()

    @keys.add("escape", "enter")
    def _(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    return keys


def _history() -> History:
    """What was typed in earlier runs, in a file of this user's alone; where there can be none, of this run."""
    try:
        path = make_cache() / HISTORY
        path.touch(0o600)
        path.chmod(0o600)
    except (OSError, StoreError):
        return InMemoryHistory()
    return FileHistory(str(path))


@contextmanager
def _unheard() -> Iterator[None]:
    """What is typed while nobody asks is not shown, and is there when the next message is typed.

    Around the questions too: each gives the terminal back as it found it, and in the time between an end and a
    beginning keys would be shown.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL
    # Ctrl-C stays what it is: a signal.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(fd, termios.TCSANOW, quiet)
        yield
    finally:
        # Not TCSAFLUSH, which would forget what was typed.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)


def _tell_terminal(what: str) -> None:
    with suppress(OSError):
        os.write(sys.stdin.fileno(), what.encode())
