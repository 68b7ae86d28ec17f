"""The flags of ``outcore chat``."""

from __future__ import annotations

from ..arguments import (
    add_draft_arguments,
    add_engine_arguments,
    add_model_argument,
    add_output_arguments,
    add_prefix_cache_argument,
)
from ..parser import ArgumentParser
from ..text_arguments import add_answer_arguments, add_sampling_arguments, add_window_arguments

HELP = "q quit, r reset the conversation, h this help; Ctrl-C stops an answer, Ctrl-D quits"
SAVING_HELP = "/save FILE and /load FILE keep the conversation"
LINE_HELP = "/help is h, /bye is q; each line is a message"
MORE_HELP = "/help is h, /bye is q; Esc Enter, or \\ at the end, begins another line, and what is pasted is one message"

TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"
"""Set where standard input is lines that somebody types at a launcher elsewhere."""


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore chat",
        example="outcore chat mlx-community/Qwen3-8B-4bit --memory 4GB",
        description=f"Converse with a model. {HELP}. {SAVING_HELP}, {MORE_HELP}. What is piped in is a message a line.",
    )
    add_model_argument(parser, adapter=True)
    add_answer_arguments(parser, max_tokens=256)
    add_sampling_arguments(parser, "the same answers, drafted or not. Default: 0.")
    context = parser.add_argument_group("context")
    context.add_argument(
        "--context",
        type=int,
        help="Tokens of conversation to reserve memory for; room for more is made as they come. "
        "Default: 2048, or what fits; 256 over several machines.",
    )
    context.add_argument(
        "--session",
        metavar="NAME",
        help="Go on with the conversation of that name, and keep it; nothing of it is computed again, as long as the "
        "prefix cache has room for it. Default: none.",
    )
    add_window_arguments(context)
    add_prefix_cache_argument(context, on=True)
    add_engine_arguments(parser)
    add_draft_arguments(parser)
    add_output_arguments(parser)
    return parser
