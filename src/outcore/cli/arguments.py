"""The flags that commands share, and what they say to the library. Light: help is made of it, without MLX."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..errors import UsageError
from ..options import AUTO, DTYPES, IO_MODES, KV_DISK, PLACEMENTS, PRIORITIES, PROFILES, whole
from .parser import ArgumentParser

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")

MODEL = "A local folder, or a model of the Hugging Face Hub."
SETTLED = " Default: OUTCORE_MODEL, or the configuration file's."


def add_model_argument(
    parser: ArgumentParser, help: str = MODEL, *, needed: bool = True, adapter: bool = False, code: bool = True
) -> None:
    """Add ``--model`` and what goes with finding it, as mlx-lm names them; the model may be given without the flag.

    Args:
        needed: without a model the command takes the one that is settled, and fails where there is none.
        adapter: add ``--adapter-path``.
        code: add ``--trust-remote-code``.
    """
    parser.needs_model = needed
    parser.add_argument("model_named", nargs="?", metavar="MODEL", help="The same as --model MODEL.")
    parser.add_argument("--model", metavar="MODEL", help=help + SETTLED * needed)
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub. Default: its newest.")
    if code:
        parser.add_argument(
            "--trust-remote-code", action="store_true", help="Run code that comes with the model or its tokenizer."
        )
    if adapter:
        parser.add_argument("--adapter-path", help="Folder of trained adapter weights and their config. Default: none.")


def add_output_arguments(parser: ArgumentParser) -> None:
    """Add the flags that decide what is told, and where."""
    group = parser.add_argument_group("output")
    group.add_argument(
        "--json",
        action="store_true",
        help="Let one line of JSON be all that standard output holds; the rest goes to standard error.",
    )
    group.add_argument(
        "--quiet", action="store_true", help="Print the answer or the JSON alone; no progress, summaries or notes."
    )
    group.add_argument(
        "--log-level",
        metavar="LEVEL",
        help=f"How much Outcore, mlx-lm and transformers log: {', '.join(LOG_LEVELS)}. Default: WARNING.",
    )


def add_engine_arguments(parser: ArgumentParser) -> None:
    """Add the flags that decide how a model is held in memory."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--memory",
        metavar="SIZE",
        help="Memory for weights, slots, caches, activations and MLX's own cache together: 4GB, 1.5GiB, 50%% of what "
        "may be used now, or auto. Default: OUTCORE_MEMORY, the configuration file's, or auto, from what is free.",
    )
    group.add_argument("--resident", type=int, metavar="N", help="Keep N layers in memory. Default: what fits.")
    group.add_argument(
        "--experts",
        type=int,
        metavar="N",
        help="Mixture of experts: keep all but the experts in memory, and N of those of each layer; others are "
        "read when a token needs them. 0: stream layers whole. Default: what is fastest.",
    )
    group.add_argument(
        "--io",
        default=AUTO,
        metavar="HOW",
        help=f"How to read weights: {', '.join(IO_MODES)} (around or through the page cache). Default: %(default)s.",
    )
    group.add_argument("--slots", type=int, metavar="N", help="Slots of the ring, at least 2. Default: 3 or 2.")
    group.add_argument(
        "--priority",
        default="context",
        metavar="NAME",
        help=f"Reserve memory for the whole context, or less of it at first: {', '.join(PRIORITIES)} "
        f"({', '.join(f'{n} tokens' for n in PRIORITIES.values() if n)}, or all). Default: %(default)s.",
    )
    group.add_argument(
        "--profile",
        default="balanced",
        metavar="NAME",
        help=f"How much of what is free to use without --memory: {', '.join(PROFILES)}. Default: %(default)s.",
    )
    group.add_argument(
        "--placement",
        default="even",
        metavar="NAME",
        help=f"Where resident layers lie: {', '.join(PLACEMENTS)}. Default: %(default)s, the fastest.",
    )
    group.add_argument(
        "--kv-disk",
        default=AUTO,
        metavar="WHEN",
        help=f"Keys and values of streamed layers on disk, which every token reads: {', '.join(KV_DISK)}; auto: where "
        "the context does not fit otherwise. Of one text at a time. Default: %(default)s.",
    )
    group.add_argument(
        "--kv-dir",
        metavar="FOLDER",
        help="Where they lie, in a file without a name that goes with the process; made if no folder but the last is "
        "missing. Default: the cache folder.",
    )
    add_mirror_argument(group)
    add_compute_arguments(group, "NAME")


def add_mirror_argument(group: argparse._ActionsContainer) -> None:
    """Add ``--mirror``."""
    group.add_argument(
        "--mirror",
        action="append",
        metavar="DIR",
        help="A copy of the model's folder on another disk, or a folder that has one: what is streamed is read from "
        "both at once, and from the other where one fails. May be given several times. Default: none.",
    )


def add_compute_arguments(group: argparse._ActionsContainer, dtype: str | None = None) -> None:
    """Add the flags that decide how a model computes; ``dtype`` is what help calls the first one's value."""
    group.add_argument(
        "--dtype", metavar=dtype, help=f"Compute in {', '.join(DTYPES)}. Default: as the checkpoint says."
    )
    group.add_argument(
        "--cpu-streams", type=int, metavar="N", help="CPU device: cores that a linear layer uses. Default: all."
    )


def add_draft_arguments(parser: ArgumentParser) -> None:
    """Add the flags that decide what drafts tokens; those of mlx-lm among them."""
    group = parser.add_argument_group("drafting: several tokens from each pass over the weights, the same text")
    _add_draft(group)
    group.add_argument(
        "--draft-model", metavar="MODEL", help="The same as --draft MODEL; mlx-lm's name for it. Default: none."
    )
    group.add_argument(
        "--num-draft-tokens", type=int, metavar="N", help="Draft at most N tokens. Default: as many as are worth it."
    )


def add_planning_arguments(parser: ArgumentParser) -> None:
    """Add the flags that say what to plan for, where there is no prompt yet."""
    parser.add_argument(
        "--context", type=int, metavar="N", help="Tokens of prompt and answer to plan for. Default: 2048."
    )
    parser.add_argument(
        "--prompt-tokens", type=int, metavar="N", help="Tokens of the prompt. Default: all of the context."
    )
    _add_draft(parser)


FEWER_TOKENS = "; fewer tokens need less (--context, --prompt-tokens)"
"""For those whose budget is too small for what these flags say."""


def planning_options(args: argparse.Namespace) -> dict[str, Any]:
    """These flags as arguments of ``prepare``."""
    return {"context": args.context, "prompt": args.prompt_tokens, "draft": args.draft or AUTO}


def _add_draft(group: argparse._ActionsContainer) -> None:
    group.add_argument(
        "--draft",
        metavar="WHAT",
        help="ngram (the text's own repetitions), self or self:BITS (a low-bit copy of the model, in memory, made once;"
        " of a quantized model the high bits of its weights, of which only the low ones are read then), mtp or "
        "mtp:FOLDER (the multi-token-prediction head that the original model, there, has), none, a model with the same "
        "tokenizer, or auto: what is predicted to be fastest. Default: auto.",
    )


def add_prefix_cache_argument(group: argparse._ArgumentGroup, *, on: bool) -> None:
    """Add ``--prefix-cache``."""
    group.add_argument(
        "--prefix-cache",
        default="on" if on else "off",
        metavar="on|off|SIZE",
        help="Keep what was computed of prompts on disk, for those that begin in the same way, after a restart too. "
        "on: up to 20 GB, or a tenth of what is free, and nothing below 10 GB free; a size: up to that. "
        "Default: %(default)s.",
    )


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine's flags as fields of ``LoadOptions``."""
    memory = ("memory", "resident", "experts", "io", "slots", "priority", "profile", "placement")
    disks = ("kv_disk", "kv_dir", "mirror")
    given = {name: getattr(args, name) for name in (*memory, *disks, "dtype", "cpu_streams")}
    ranks = getattr(args, "ranks", None)
    return given | {"threads": args.preset.threads, "flags": True} | ({"ranks": ranks} if ranks is not None else {})


def check_max_tokens(tokens: int) -> None:
    """``--max-tokens``.

    Raises:
        UsageError: no number of tokens.
    """
    if tokens == 0 or tokens < -1:
        raise UsageError(f"--max-tokens {tokens}: ask for at least one token, or -1 for no limit")
    whole("--max-tokens", tokens, -1)


def model_name(model: str) -> str:
    """What a model is called where its path is nobody's business: one of the Hub by its name, one on this machine by
    its folder's."""
    given = Path(model)
    return given.resolve().name if given.exists() else model
