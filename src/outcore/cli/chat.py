"""``outcore chat``: a conversation with a model. Flags and commands are those of ``mlx_lm.chat``."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..checks import whole
from ..decode.conversation import ChatTemplate
from ..decode.loader import load_model
from ..engine.transport import Agreement
from ..errors import BudgetError, StoreError, UsageError
from ..machine.cache_folder import SESSIONS, make_cache, require_own
from ..text import counted, shortened
from .answers import Chat
from .chat_commands import Commands
from .commands import LEAVES, TYPED_ELSEWHERE
from .engine import (
    ProgressBar,
    draft_tokens,
    engine_record,
    generation_options,
    interruptible,
    open_tokenizer,
    print_summary,
    watched,
)
from .flags import loading_options, model_name, template_options, text_of
from .output import tell
from .piped import read_line

# Context lengths to plan for, in the order tried, when ``--context`` is not given. None: the default length.
CONTEXTS = None, 512, 256

SESSION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

# Tokens of a message that memory is reserved for at first; longer messages get room when they come.
MESSAGE = 512


def run(args: argparse.Namespace) -> None:
    draft_tokens(args)
    mx.random.seed(whole("--seed", args.seed or 0, 0, 2**64 - 1))
    with ProgressBar() as bar, session_file(args.session) as path:
        commands = Commands(args, lambda given: prepared(given, bar))
        with closing(commands):
            kept = commands.chat.kept
            kept.typed = sys.stdin.isatty()  # piped lines are a program's, and are not kept
            kept.begin()
            if sys.stdin.isatty() or TYPED_ELSEWHERE in os.environ:
                commands.chat.greet()
            if path is not None and kept.resume(path) and args.system_prompt:
                tell("outcore chat: --system-prompt ignored: the session keeps the one that it began with")
            if images := getattr(args, "image", None):
                commands.add_images(images)
            del kept  # it refers to the model, which /model frees
            try:
                with closing(shared_lines(commands.chat.agreement)) as messages:
                    for line in messages:
                        if not commands.handle(line):
                            break
            finally:  # also when Ctrl-C ends it
                turns, record, session = commands.chat.turns, commands.chat.record(), commands.chat.session
                tokens = counted(record["generation_tokens"], "token")
                print_summary([f"Conversation: {counted(len(turns), 'answer')}, {tokens}"], session)
                args.result.record = record | engine_record(session)


def prepared(args: argparse.Namespace, bar: ProgressBar) -> Callable[[], Chat]:
    """Checks what can be checked without the weights. Returns the function that loads the model."""
    options = template_options(args.chat_template_config)
    system = None if args.system_prompt is None else text_of("--system-prompt", args.system_prompt)
    folder, tokenizer = open_tokenizer(args, {})
    template = ChatTemplate(tokenizer, system, options, args.preset.messages)

    def load() -> Chat:
        model = _load(folder, args, bar)
        bar.clear()
        watched(model, args)
        chat = Chat(model, template, generation_options(args, tokenizer), bar, args.model, args.preset.stop)
        with suppress(OSError, StoreError):
            # No session has this name.
            name = re.sub(r"[^A-Za-z0-9._-]+", "--", model_name(args.model))[-80:]
            chat.kept.stem = sessions_folder() / f"last+{name}"
        return chat

    return load


def _load(folder: Path, args: argparse.Namespace, bar: ProgressBar) -> nn.Module:
    """Loads the model, planned for ``--context`` or for the first of ``CONTEXTS`` that the budget allows."""
    contexts = CONTEXTS if args.context is None else (args.context,)
    if args.ranks is not None:
        # Each rank would find out for itself whether a context fits.
        contexts = contexts[-1:]
    options = loading_options(args) | {"prompt": MESSAGE, "resumable": True}
    for context in contexts:
        try:
            return load_model(folder, **(options | {"context": context}), progress=bar)[0]
        except BudgetError:  # before anything is read
            if context == contexts[-1]:
                raise
    raise AssertionError


def sessions_folder() -> Path:
    """Returns the folder of conversations, made for this user alone."""
    folder = make_cache() / SESSIONS
    folder.mkdir(mode=0o700, exist_ok=True)
    require_own(folder)
    return folder


@contextmanager
def session_file(name: str | None) -> Iterator[Path | None]:
    if name is None:
        yield None
        return
    if not SESSION.fullmatch(name):
        raise UsageError(f"--session {shortened(name)}: use at most 64 letters, digits, dots, dashes and underscores")
    try:
        folder = sessions_folder()
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise UsageError(f"--session {name}: cannot be saved ({e.strerror})") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--session {name}: in use by another process; give another name") from None
        yield folder / f"{name}.json"
    finally:
        os.close(lock)


def shared_lines(agreement: Agreement) -> Generator[str, None, None]:
    with closing(lines()) as typed, ExitStack() as answering:

        def read() -> str:
            answering.close()
            # From here to the next message Ctrl-C only stops what is done with this one; a command it ends.
            if (line := next(typed, None)) is not None and not line.startswith("/"):
                answering.enter_context(interruptible())
            return json.dumps(line)

        # Only the first rank calls the function, and so reads its input.
        while (line := json.loads(agreement.text(read))) is not None:
            yield line


def lines() -> Generator[str, None, None]:
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are not UTF-8 do not end the chat.
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
        from .terminal import typed

        yield from typed(on_error=not sys.stdout.isatty())
        return
    pressed = TYPED_ELSEWHERE not in os.environ
    while True:
        try:
            line = read_line()
        except KeyboardInterrupt:
            # As in ``typed``: somebody sits at a terminal, and may have meant the answer before.
            if pressed:
                raise
            pressed = True
            tell(LEAVES)
            continue
        pressed = TYPED_ELSEWHERE not in os.environ
        if not line:
            return
        if line.strip():
            yield line.removesuffix("\n")
