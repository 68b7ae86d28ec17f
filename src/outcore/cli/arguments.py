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
from ..text import half_character, one_line
from .flags import GROUPS


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags as fields of ``LoadOptions``."""
    names = [name.replace("-", "_") for name in (*GROUPS["engine-flags"], "priority", "ranks")]
    given = {name: getattr(args, name) for name in names if hasattr(args, name)}
    return given | {"flags": True}


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    """The same with ``--prefill-step-size``, ``--trust-remote-code`` and ``--adapter-path``."""
    more = ("prefill_step_size", "trust_remote_code", "adapter_path")
    return engine_options(args) | {name: getattr(args, name) for name in more}


def check_max_tokens(tokens: int) -> None:
    """``--max-tokens``."""
    if tokens == 0 or tokens < -1:
        raise UsageError(f"--max-tokens {tokens}: ask for at least one token, or -1 for no limit")
    whole("--max-tokens", tokens, -1)


def check_window(args: argparse.Namespace) -> None:
    """``--max-kv-size``."""
    if args.max_kv_size is not None:
        whole("--max-kv-size", args.max_kv_size)


def text_of(flag: str, text: str) -> str:
    """What was given as text; a command line may hold bytes that are not UTF-8."""
    if (at := half_character(text)) is not None:
        raise UsageError(f"{flag}: not UTF-8 text from character {at} on; convert it")
    return text


def template_options(text: str | None) -> dict[str, Any]:
    """``--chat-template-config``."""
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
