"""Turns parsed flags into arguments of the library, and checks flags that several commands share. Imports no MLX."""

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


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in (*OPTIONS, "trust_remote_code", "ranks") if hasattr(args, name)}
    if "draft" in given:
        given["draft"] = args.draft or AUTO
    if hasattr(args, "prompt_tokens"):
        given["prompt"] = args.prompt_tokens
    return given


def check_numbers(args: argparse.Namespace) -> None:
    if (tokens := getattr(args, "max_tokens", 1)) == 0 or tokens < -1:
        raise UsageError(f"--max-tokens {tokens}: give at least 1, or -1 for no limit")
    whole("--max-tokens", tokens, -1)
    for name, supported in QUANTIZED.items():
        number = getattr(args, name, None)
        if number is not None and number not in supported:
            raise UsageError(f"--{name.replace('_', '-')} {number}: choose from {', '.join(map(str, supported))}")
    for name, least in (("quantized_kv_start", 0), ("max_kv_size", 1), ("prefill_step_size", 1)):
        if (number := getattr(args, name, None)) is not None:
            whole(f"--{name.replace('_', '-')}", number, least)


def cache_options(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_kv_size", *QUANTIZED, "quantized_kv_start", "prefill_step_size")
    return {name: value for name in names if (value := getattr(args, name, None)) is not None}


def text_of(flag: str, text: str) -> str:
    """Returns the text if it is valid UTF-8, which a command line need not be."""
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
    """Returns the Hub name, or the folder's name without its path, for output that may be shared."""
    given = Path(model)
    return given.resolve().name if given.exists() else model
