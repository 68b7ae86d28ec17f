"""``outcore chat``: converse with a model. Flags and commands are those of ``mlx_lm.chat``."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..checkpoint.lazy_model import config_of
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.conversation import ChatTemplate
from ..decode.sampling import make_sampler
from ..engine.transport import Agreement, transport_of
from ..errors import BudgetError, UsageError
from ..loading.loader import load_model
from ..machine.cache_contents import SESSIONS
from ..machine.cache_folder import make_cache, require_own
from ..options import whole
from ..text import counted, shortened
from .answers import Chat
from .arguments import check_max_tokens, engine_options
from .engine import (
    ProgressBar,
    check_sampling_flags,
    draft_options,
    engine_record,
    print_summary,
    progress_bar,
    template_options,
    text_of,
    watched,
)
from .failures import tell
from .flags.chat import TYPED_ELSEWHERE
from .model_folder import model_folder
from .preset import Preset
from .text_arguments import check_window_arguments

CONTEXTS = None, 512, 256
"""Tokens of conversation that memory is reserved for at first: what fits of these. None: what is usual."""

SESSION = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")

MESSAGE = 512
"""Tokens of a message that memory is reserved for; more is made room for as it comes."""


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_max_tokens(args.max_tokens)
    draft, drafting = draft_options(args)
    check_window_arguments(args)
    if args.context is not None:
        whole("--context", args.context)
    mx.random.seed(whole("--seed", args.seed or 0, 0, 2**64 - 1))
    options = template_options(args.chat_template_config)
    system = None if args.system_prompt is None else text_of("--system-prompt", args.system_prompt)
    folder = model_folder(args)
    trust = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(folder, trust, eos=config_of(folder).get("eos_token_id"), extra_eos=args.extra_eos_token)
    check_sampling_flags(args, folder, tokenizer)
    preset: Preset = args.preset
    preset.prepare(tokenizer, config_of(folder))
    template = ChatTemplate(tokenizer, system, options, preset.messages)
    with progress_bar() as bar:
        model = _load(folder, args, draft, bar)
        bar.clear()
        with watched(model, args):
            given = {
                "max_tokens": args.max_tokens,
                "max_kv_size": args.max_kv_size,
                "kv_eviction": args.kv_eviction,
                "sampler": make_sampler(
                    args.temp,
                    args.top_p,
                    args.min_p,
                    top_k=args.top_k,
                    xtc_probability=args.xtc_probability,
                    xtc_threshold=args.xtc_threshold,
                    xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
                    coupled=args.seed is not None,
                ),
                **preset.options(),
                **drafting,
                **({"prefill_step_size": args.prefill_step_size} if args.prefill_step_size else {}),
            }
            chat = Chat(model, template, given, bar, args.model, preset.stop)
            if sys.stdin.isatty() or TYPED_ELSEWHERE in os.environ:
                chat.greet()
            with session_file(args.session) as path:
                if path is not None and chat.resume(path) and args.system_prompt:
                    tell("outcore chat: --system-prompt: this conversation has begun already; it is as it was")
                try:
                    with closing(heard(transport_of(model))) as messages:
                        for line in messages:
                            if line.strip() in ("q", "/bye"):
                                break
                            chat.hear(line)
                finally:
                    chat.leave()
            print_summary(
                [f"Conversation: {counted(len(chat.turns), 'answer')}, {counted(len(chat.tokens), 'token')}"],
                model.outcore,
            )
            args.result.record = chat.record() | engine_record(model.outcore)


def _load(folder: Path, args: argparse.Namespace, draft: str, bar: ProgressBar) -> nn.Module:
    """The model, planned for a context of the usual length or, unless one was asked for, for what the budget allows."""

    def load(context: int | None) -> nn.Module:
        return load_model(
            folder,
            **engine_options(args),
            draft=draft,
            context=context,
            prompt=MESSAGE,
            resumable=True,
            prefix_cache=args.prefix_cache,
            prefill_step_size=args.prefill_step_size,
            trust_remote_code=args.trust_remote_code,
            adapter_path=args.adapter_path,
            progress=bar,
        )[0]

    contexts = CONTEXTS if args.context is None else (args.context,)
    if getattr(args, "ranks", None) is not None:
        # Whether there is room would be found by each rank for itself.
        contexts = contexts[-1:]
    for context in contexts[:-1]:
        # Refused before anything is read.
        with suppress(BudgetError):
            return load(context)
    return load(contexts[-1])


@contextmanager
def session_file(name: str | None) -> Iterator[Path | None]:
    """Where a session's conversation is kept, which no other process has meanwhile; None: there is no session.

    Raises:
        UsageError: no name for one, or it is under way in another process.
    """
    if name is None:
        yield None
        return
    if not SESSION.fullmatch(name):
        raise UsageError(f"--session {shortened(name)}: give letters, digits, dots, dashes and underscores, 64 at most")
    try:
        folder = make_cache() / SESSIONS
        folder.mkdir(mode=0o700, exist_ok=True)
        require_own(folder)
        lock = os.open(folder / f"{name}.lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as e:
        raise UsageError(f"--session {name}: cannot be kept ({e.strerror})") from e
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(f"--session {name}: is under way in another process; give another name") from None
        yield folder / f"{name}.json"
    finally:
        os.close(lock)


def heard(agreement: Agreement) -> Generator[str, None, None]:
    """``lines`` of the first of the ranks that share the model, on all of them."""
    with closing(lines() if agreement.chooses else nothing()) as typed:
        while (line := json.loads(agreement.text(lambda: json.dumps(next(typed, None))))) is not None:
            yield line


def nothing() -> Generator[str, None, None]:
    yield from ()


def lines() -> Generator[str, None, None]:
    """What the user types, or what standard input holds, without empty lines."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are no text are no reason to end.
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty()):
        from .terminal import typed

        yield from typed(on_error=not sys.stdout.isatty())
        return
    while True:
        try:
            line = input()
        except EOFError:
            return
        if line.strip():
            yield line
