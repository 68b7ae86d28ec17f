"""``outcore chat``: converse with a model. Flags and commands are those of ``mlx_lm.chat``."""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, suppress
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from ..errors import BudgetError
from ..generation.conversation import ChatTemplate
from ..generation.sampling import make_sampler
from ..loading.loader import load_model
from ..model.checkpoint import resolve_model
from ..model.lazy_model import config_of
from ..model.tokenizer import load_tokenizer
from ..options import whole
from .answers import HELP, MORE_HELP, Chat
from .engine import (
    Bar,
    add_draft_arguments,
    add_engine_arguments,
    add_model_argument,
    check_max_tokens,
    check_sampling_flags,
    draft_options,
    engine_options,
    engine_record,
    print_summary,
    progress_bar,
    template_options,
    text_of,
)
from .parser import Parser

CONTEXTS = None, 512, 256
"""Tokens of conversation that memory is reserved for at first: what fits of these. None: what is usual."""

MESSAGE = 512
"""Tokens of a message that memory is reserved for; more is made room for as it comes."""


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    parser = Parser(
        prog="outcore chat",
        description=f"Converse with a model. {HELP}. {MORE_HELP}. What is piped in is a message a line.",
    )
    add_model_argument(parser)
    parser.add_argument("--adapter-path", help="Folder of trained adapter weights and their config.")
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=256, help="Most tokens of an answer; -1 for no limit. Default: 256."
    )
    parser.add_argument("--system-prompt", help="System prompt for the chat template.")
    parser.add_argument("--chat-template-config", help="Further arguments of the chat template, as JSON.")
    parser.add_argument("--extra-eos-token", nargs="+", default=(), help="Further tokens that end an answer.")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temp", type=float, default=0.0, help="Temperature; 0 takes the likeliest token. Default: 0.0."
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="Draw from the likeliest tokens of so much probability together; 1.0 for all. Default: 1.0.",
    )
    sampling.add_argument(
        "--xtc-probability",
        type=float,
        default=0.0,
        help="How often the likeliest of several likely tokens are left out (XTC). Default: 0.0.",
    )
    sampling.add_argument(
        "--xtc-threshold",
        type=float,
        default=0.1,
        help="From which probability on XTC calls a token likely. Default: 0.1.",
    )
    sampling.add_argument(
        "--seed", type=int, help="Seed of the random numbers: the same answers, drafted or not. Default: 0."
    )
    context = parser.add_argument_group("context")
    context.add_argument(
        "--context",
        type=int,
        help="Tokens of conversation to reserve memory for; room for more is made as they come. "
        "Default: 2048, or what fits.",
    )
    context.add_argument("--max-kv-size", type=int, help="Most tokens that the key-value cache keeps.")
    context.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    add_engine_arguments(parser)
    add_draft_arguments(parser)
    parser.add_argument("--json", action="store_true", help="End standard output with one line of JSON.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    args = setup_arg_parser().parse_args(argv)
    check_max_tokens(args.max_tokens)
    draft, drafting = draft_options(args)
    for flag, number in (("--max-kv-size", args.max_kv_size), ("--context", args.context)):
        if number is not None:
            whole(flag, number)
    mx.random.seed(whole("--seed", args.seed or 0, 0, 2**64 - 1))
    options = template_options(args.chat_template_config)
    system = None if args.system_prompt is None else text_of("--system-prompt", args.system_prompt)
    folder = resolve_model(args.model, args.revision)
    trust = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(folder, trust, eos=config_of(folder).get("eos_token_id"), extra_eos=args.extra_eos_token)
    check_sampling_flags(args, folder, tokenizer)
    template = ChatTemplate(tokenizer, system, options)
    with progress_bar() as bar:
        model = _load(folder, args, draft, bar)
        bar.clear()
        with model.outcore:
            given = {
                "max_tokens": args.max_tokens,
                "max_kv_size": args.max_kv_size,
                "sampler": make_sampler(
                    args.temp,
                    args.top_p,
                    xtc_probability=args.xtc_probability,
                    xtc_threshold=args.xtc_threshold,
                    xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
                    coupled=args.seed is not None,
                ),
                **drafting,
                **({"prefill_step_size": args.prefill_step_size} if args.prefill_step_size else {}),
            }
            chat = Chat(model, template, given, bar, name=args.model)
            terminal = sys.stdin.isatty()
            if terminal:
                chat.greet()
            with closing(lines()) as messages:
                for line in messages:
                    if line.strip() == "q" or (terminal and line.strip() == "/bye"):
                        break
                    chat.hear(line, commands=terminal)
            print_summary([f"Conversation: {len(chat.turns)} answers, {len(chat.tokens)} tokens"], model.outcore)
            if args.json:
                print(json.dumps(chat.record() | engine_record(model.outcore)))


def _load(folder: Path, args: argparse.Namespace, draft: str, bar: Bar) -> nn.Module:
    """The model, planned for a context of the usual length or, unless one was asked for, for what the budget allows."""

    def load(context: int | None) -> nn.Module:
        return load_model(
            folder,
            **engine_options(args),
            draft=draft,
            context=context,
            prompt=MESSAGE,
            resumable=True,
            prefill_step_size=args.prefill_step_size,
            trust_remote_code=args.trust_remote_code,
            adapter_path=args.adapter_path,
            progress=bar,
        )[0]

    contexts = CONTEXTS if args.context is None else (args.context,)
    for context in contexts[:-1]:
        # Refused before anything is read.
        with suppress(BudgetError):
            return load(context)
    return load(contexts[-1])


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
