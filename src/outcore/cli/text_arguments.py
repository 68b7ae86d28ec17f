"""The flags of commands that make text: how long it is, how tokens are drawn, and what a cache keeps of it."""

from __future__ import annotations

from argparse import Namespace, _ArgumentGroup

from ..errors import UsageError
from ..options import KV_EVICTIONS, LEAST_HALVED, choice, whole
from .parser import ArgumentParser


def add_answer_arguments(parser: ArgumentParser, max_tokens: int) -> None:
    """Add what an answer and its chat template are told.

    Args:
        max_tokens: unless the user says how many.
    """
    parser.add_argument(
        "--max-tokens",
        "-m",
        type=int,
        default=max_tokens,
        help="Most tokens of an answer; -1 for no limit. Default: %(default)s.",
    )
    parser.add_argument("--system-prompt", help="System prompt for the chat template. Default: the template's.")
    parser.add_argument(
        "--chat-template-config", help="Further arguments of the chat template, as JSON. Default: none."
    )
    parser.add_argument(
        "--extra-eos-token", nargs="+", default=(), help="Further tokens that end an answer. Default: none."
    )


def add_sampling_arguments(parser: ArgumentParser, seed: str) -> _ArgumentGroup:
    """Add how tokens are drawn; the group, for further ones.

    Args:
        seed: what ``--seed`` is for, and what it is otherwise.
    """
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
        "--min-p",
        type=float,
        default=0.0,
        help="Leave out tokens less likely than this share of the likeliest. Default: 0.0.",
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, help="Draw from so many likeliest tokens; 0 for all. Default: 0."
    )
    sampling.add_argument("--seed", type=int, help=f"Seed of the random numbers: {seed}")
    return sampling


def add_window_arguments(group: _ArgumentGroup | ArgumentParser, *, eviction: bool = True) -> None:
    """Add how a prompt is computed, and how much of the text is kept."""
    group.add_argument("--max-kv-size", type=int, help="Most tokens that the key-value cache keeps. Default: all.")
    if eviction:
        group.add_argument(
            "--kv-eviction",
            metavar="HOW",
            help="What goes where there are so many tokens. window: older ones, one by one, but for the first four; "
            "halve: the older half but for those, and what stays is computed anew; none: nothing, the text ends. "
            "Default: window.",
        )
    group.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")


def check_window_arguments(args: Namespace) -> None:
    """Refuse what cannot be meant.

    Raises:
        UsageError: no such eviction, one of nothing, or too few tokens for it.
    """
    how, most = args.kv_eviction, args.max_kv_size
    if how is not None:
        choice("--kv-eviction", how, KV_EVICTIONS)
        if most is None:
            raise UsageError(f"--kv-eviction {how}: of how many tokens? give --max-kv-size too")
    if most is not None:
        whole("--max-kv-size", most, LEAST_HALVED if how == "halve" else 1)


def add_quantized_cache_arguments(group: _ArgumentGroup | ArgumentParser) -> None:
    """Add in how many bits a key-value cache is kept."""
    group.add_argument("--kv-bits", type=int, help="Quantize the key-value cache to so many bits. Default: not at all.")
    group.add_argument("--kv-group-size", type=int, default=64, help="Numbers that share a scale there. Default: 64.")
    group.add_argument(
        "--quantized-kv-start",
        type=int,
        default=5000,
        help="Token from which it is quantized; shorter texts are not. Default: 5000.",
    )
