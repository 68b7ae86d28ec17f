"""Every flag that commands share, declared once: its names, type, default and help. Imports no MLX.

What says how a model is held in memory is declared by ``LoadOptions``; here stands only its place among the flags.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..options import LoadOptions, said_of
from .parser import LOG_LEVELS, Flag, flag, grouped, switch

SETTLED = " Default: OUTCORE_MODEL, or the configuration file's."
MODEL = "A local folder, or a model of the Hugging Face Hub."


def _option(name: str, *names: str, **settings: Any) -> Flag:
    """A field of ``LoadOptions`` as a flag."""
    field = LoadOptions.__dataclass_fields__[name]
    found = {"help": said_of(name), "default": field.default, "metavar": field.metadata["metavar"]}
    found["type"] = int if field.metadata["least"] is not None else None
    return Flag((f"--{name.replace('_', '-')}", *names), "", found | settings)


_ENGINE = grouped(
    "engine",
    *(_option(name) for name in ("memory", "resident", "experts", "slots", "io", "kv_disk")),
    _option("mirror", action="append"),
    *(_option(name) for name in ("dtype", "cpu_streams")),
)

_OUTPUT = grouped(
    "output",
    switch("--json", "Let one line of JSON be all that standard output holds; the rest goes to standard error."),
    switch("--quiet", "Print the answer or the JSON alone; no progress, summaries or notes."),
    flag("--log-level", f"How much is logged: {', '.join(LOG_LEVELS)}. Default: WARNING.", metavar="LEVEL"),
)

_FLAGS = [
    flag("model_named", "The same as --model MODEL.", nargs="?", metavar="MODEL"),
    flag("--model", MODEL + SETTLED, metavar="MODEL"),
    flag("--revision", "A branch, tag or commit on the Hub. Default: its newest."),
    switch("--trust-remote-code", "Run code that comes with the model or its tokenizer."),
    _option("adapter_path"),
    flag("--prompt -p", "The prompt; - reads it from standard input."),
    flag("--max-tokens -m", "Most tokens of an answer; -1 for no limit.", type=int),
    flag("--system-prompt", "System prompt for the chat template. Default: the template's."),
    flag("--chat-template-config --chat-template-args", "Further arguments of the chat template.", metavar="JSON"),
    flag("--extra-eos-token", "Further tokens that end an answer.", (), nargs="+"),
    flag("--prefill-response", "Beginning of the answer, for the chat template."),
    switch("--ignore-chat-template", "Take the prompt as it is."),
    *grouped(
        "sampling",
        flag("--temp", "Temperature; 0 takes the likeliest token.", 0.0),
        flag("--top-p", "Draw from the likeliest tokens of so much probability together; 1.0 for all.", 1.0),
        flag("--top-k", "Draw from so many likeliest tokens; 0 for all.", 0),
        flag("--min-p", "Leave out tokens less likely than this share of the likeliest.", 0.0),
        flag("--min-tokens-to-keep", "Tokens that --min-p leaves at least.", 1),
        flag("--xtc-probability", "How often the likeliest of several likely tokens are left out (XTC).", 0.0),
        flag("--xtc-threshold", "From which probability on XTC calls a token likely.", 0.1),
        flag(
            "--seed",
            "Seed of the random numbers: the same text, drafted or not. Default: another each time.",
            type=int,
        ),
    ),
    *grouped(
        "context",
        _option("context"),
        flag("--prompt-tokens", "Tokens of the prompt. Default: all of the context.", type=int, metavar="N"),
        flag("--max-kv-size", "Most tokens that the key-value cache keeps. Default: all.", type=int),
        flag("--prompt-cache-file", "A prompt cache of outcore cache-prompt or mlx_lm.cache_prompt.", metavar="FILE"),
        flag("--kv-bits", "Quantize the key-value cache to so many bits. Default: not at all.", type=int),
        flag("--kv-group-size", "Numbers that share a scale there.", 64),
        flag("--quantized-kv-start", "Token from which it is quantized; shorter texts are not.", 5000),
        _option("prefix_cache"),
        _option("prefill_step_size"),
        switch("--quantize-activations -qa", "Where the quantization allows it."),
    ),
    *_ENGINE,
    # Not for commands that serve several requests: those take memory for texts as they come.
    _option("priority").but(group="engine"),
    *grouped(
        "drafting: several tokens from each pass over the weights, the same text",
        # mlx-lm's name for a model that drafts is another name here, as that is one thing to draft with. A flag that
        # was not given is told from auto.
        _option("draft", "--draft-model", default=None),
        flag("--num-draft-tokens", "Draft at most N tokens. Default: as many as are worth it.", type=int, metavar="N"),
    ),
    flag("--input -i", "Requests, one JSON a line.", type=Path, required=True, metavar="FILE"),
    flag("--output -o", "Where to write.", type=Path, metavar="FILE"),
    flag("--decode-concurrency --concurrency", "Answers at most that share a sweep.", 32, metavar="N"),
    flag("--repeats --num-trials -n", "Timed runs; the median counts.", 3),
    switch("--force --overwrite", "Replace what is there already."),
    *_OUTPUT,
]

FLAGS = {each.name: each for each in _FLAGS}
"""By the first of their names."""

OPTIONS = [name for name in LoadOptions.__dataclass_fields__ if name.replace("_", "-") in FLAGS and name != "prompt"]
"""Fields of ``LoadOptions`` that are flags, by the fields' names; ``--prompt`` is another thing."""

GROUPS = {
    "engine-flags": [each.name for each in _ENGINE],
    "output-flags": [each.name for each in _OUTPUT],
    "model-flags": ["model_named", "model", "revision", "trust-remote-code"],
}
"""Those that commands take together."""


def named(listed: Iterable[str | Flag]) -> Iterator[Flag]:
    """Flags in the order of the help.

    Args:
        listed: names in ``FLAGS`` or ``GROUPS`` with spaces between them, and flags of a command's own.
    """
    for each in listed:
        if isinstance(each, Flag):
            yield each
        else:
            for name in each.split():
                yield from (FLAGS[one] for one in GROUPS.get(name, [name]))
