"""Parsed flags as arguments of the library, and checks that several commands share. Imports no MLX.

What cannot be meant is refused with a UsageError that names the flag.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ..checks import whole
from ..errors import UsageError
from ..options import AUTO
from ..text import half_character, one_line
from .flags import OPTIONS

QUANTIZED = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}
"""What MLX quantizes keys and values to."""


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """What a command's flags say of how a model is loaded, as fields of ``LoadOptions``."""
    given = {name: getattr(args, name) for name in (*OPTIONS, "trust_remote_code", "ranks") if hasattr(args, name)}
    if "draft" in given:
        given["draft"] = args.draft or AUTO
    if hasattr(args, "prompt_tokens"):
        given["prompt"] = args.prompt_tokens
    return given


def check_numbers(args: argparse.Namespace) -> None:
    """``--max-tokens``, and the numbers that the key-value cache goes by, where a command has them."""
    if (tokens := getattr(args, "max_tokens", 1)) == 0 or tokens < -1:
        raise UsageError(f"--max-tokens {tokens}: ask for at least one token, or -1 for no limit")
    whole("--max-tokens", tokens, -1)
    for name, known in QUANTIZED.items():
        number = getattr(args, name, None)
        if number is not None and number not in known:
            raise UsageError(f"--{name.replace('_', '-')} {number}: choose from {', '.join(map(str, known))}")
    for name, least in (("quantized_kv_start", 0), ("max_kv_size", 1), ("prefill_step_size", 1)):
        if (number := getattr(args, name, None)) is not None:
            whole(f"--{name.replace('_', '-')}", number, least)


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    """How a prompt is computed and its cache kept, as arguments of ``stream_generate``."""
    names = ("max_kv_size", *QUANTIZED, "quantized_kv_start", "prefill_step_size")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def text_of(flag: str, text: str) -> str:
    """What was given as text; a command line may hold bytes that are not UTF-8."""
    if (at := half_character(text)) is not None:
        raise UsageError(f"{flag}: not UTF-8 text from character {at} on; convert it")
    return text


def template_options(text: str | None) -> dict[str, Any]:
    flag = "--chat-template-config"
    text = text_of(flag, text or "{}")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise UsageError(f"{flag}: not JSON: {one_line(e)}") from e
    if not isinstance(options, dict):
        raise UsageError(f'{flag}: give a JSON object, such as {{"enable_thinking": false}}')
    return options


def model_name(model: str) -> str:
    """What a model is called where its path is nobody's business: one of the Hub by its name, one on this machine by
    its folder's."""
    given = Path(model)
    return given.resolve().name if given.exists() else model
