"""Reads chat messages from a terminal, with line editing and history."""

from __future__ import annotations

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
from .commands import LEAVES

PROMPT, MORE = "> ", ". "

# File in the cache folder; ``outcore cache clear`` leaves it, as it cannot be made again.
HISTORY = "chat-history"


def typed(on_error: bool) -> Iterator[str]:
    """Yields messages that are not empty until the end of input. Ctrl-C clears the line; twice on an empty one raises
    ``KeyboardInterrupt``.

    Args:
        on_error: show the prompt on standard error, as standard output is not a terminal.
    """
    session: PromptSession[str] = PromptSession(
        history=_history(),
        multiline=True,
        key_bindings=_keys(),
        prompt_continuation=MORE,
        output=create_output(stdout=sys.stderr) if on_error else None,
    )
    with _no_echo():
        pressed = False
        while True:
            try:
                text = session.prompt(PROMPT)
            except EOFError:
                return
            except KeyboardInterrupt:
                # What was being typed is cleared, and that alone never leads out of the chat.
                empty = not session.default_buffer.text
                if empty and pressed:
                    raise
                pressed = empty
                if empty:
                    print(LEAVES, file=sys.stderr)
                continue
            pressed = False
            if text.strip():
                yield text


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
    try:
        path = make_cache() / HISTORY
        path.touch(0o600)
        path.chmod(0o600)
    except (OSError, StoreError):
        return InMemoryHistory()
    return FileHistory(str(path))


@contextmanager
def _no_echo() -> Iterator[None]:
    """Hides what is typed during an answer; it appears when the next message is read.

    The block encloses reading messages too: between two prompts keys would be echoed.
    """
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)
    quiet = termios.tcgetattr(fd)
    quiet[0] &= ~termios.ICRNL
    # ISIG stays set: Ctrl-C sends its signal.
    quiet[3] &= ~(termios.ECHO | termios.ICANON)
    try:
        termios.tcsetattr(fd, termios.TCSANOW, quiet)
        yield
    finally:
        # Not TCSAFLUSH, which would discard what was typed.
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSANOW, before)
