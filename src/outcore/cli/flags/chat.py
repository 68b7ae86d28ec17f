"""The flags of ``outcore chat``."""

from __future__ import annotations

from ..arguments import add_draft_arguments, add_engine_arguments, add_model_argument, add_output_arguments
from ..parser import Parser

HELP = "q quit, r reset the conversation, h this help; Ctrl-C stops an answer, Ctrl-D quits"
MORE_HELP = (
    "/save FILE and /load FILE keep the conversation, /help is h, /bye is q; Esc Enter, or \\ at the end, begins "
    "another line, and what is pasted is one message"
)


def setup_arg_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="outcore chat",
        example="outcore chat mlx-community/Qwen3-8B-4bit --memory 4GB",
        description=f"Converse with a model. {HELP}. {MORE_HELP}. What is piped in is a message a line.",
    )
    add_model_argument(parser, adapter=True)
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=256, help="Most tokens of an answer; -1 for no limit. Default: 256."
    )
    parser.add_argument("--system-prompt", help="System prompt for the chat template. Default: the template's.")
    parser.add_argument(
        "--chat-template-config", help="Further arguments of the chat template, as JSON. Default: none."
    )
    parser.add_argument(
        "--extra-eos-token", nargs="+", default=(), help="Further tokens that end an answer. Default: none."
    )
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
    context.add_argument("--max-kv-size", type=int, help="Most tokens that the key-value cache keeps. Default: all.")
    context.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    add_engine_arguments(parser)
    add_draft_arguments(parser)
    add_output_arguments(parser)
    return parser
