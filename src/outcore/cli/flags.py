"""The flags that commands share, each declared once. Flags that set a field of ``LoadOptions`` take type, default and
help from there. Imports no MLX."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..options import LoadOptions, said_of
from .parser import LOG_LEVELS, Flag, flag, grouped, switch

SETTLED = " Default: OUTCORE_MODEL, or the configuration file's."
MODEL = "A local folder, or a model of the Hugging Face Hub."


def _option(name: str, *names: str, **settings: Any) -> Flag:
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
    switch("--json", "Print one line of JSON on standard output; everything else goes to standard error."),
    switch("--quiet", "Print only the answer or the JSON; no progress, summary or notes."),
    flag("--log-level", f"What to log: {', '.join(LOG_LEVELS)}. Default: WARNING.", metavar="LEVEL"),
)

_FLAGS = [
    flag("model_named", "The same as --model MODEL.", nargs="?", metavar="MODEL"),
    flag("--model", MODEL + SETTLED, metavar="MODEL"),
    flag("--revision", "A branch, tag or commit on the Hub. Default: the newest."),
    switch("--trust-remote-code", "Run Python code that comes with the model or its tokenizer."),
    _option("adapter_path"),
    flag("--prompt -p", "The prompt; - reads it from standard input."),
    flag("--max-tokens -m", "Most tokens of an answer; -1 for no limit.", type=int),
    flag("--system-prompt", "System prompt. Default: the chat template's."),
    flag("--chat-template-config --chat-template-args", "More arguments for the chat template.", metavar="JSON"),
    flag("--extra-eos-token", "More tokens that end an answer.", (), nargs="+"),
    flag("--prefill-response", "Text that the answer begins with."),
    switch("--ignore-chat-template", "Use the prompt as it is, without the chat template."),
    *grouped(
        "sampling",
        flag("--temp", "Temperature; 0 always takes the likeliest token.", 0.0),
        flag("--top-p", "Sample from the likeliest tokens whose probabilities add up to this; 1.0 for all.", 1.0),
        flag("--top-k", "Sample from this many of the likeliest tokens; 0 for all.", 0),
        flag("--min-p", "Leave out tokens less likely than this fraction of the likeliest one.", 0.0),
        flag("--min-tokens-to-keep", "Fewest tokens that --min-p leaves.", 1),
        flag(
            "--xtc-probability", "Probability of leaving out all but the least likely of the likely tokens (XTC).", 0.0
        ),
        flag("--xtc-threshold", "Probability from which XTC counts a token as likely.", 0.1),
        flag(
            "--seed",
            "Random seed; the same seed gives the same text, with or without drafts. Default: random.",
            type=int,
        ),
    ),
    *grouped(
        "context",
        _option("context"),
        flag("--prompt-tokens", "Tokens of the prompt. Default: all of the context.", type=int, metavar="N"),
        flag("--max-kv-size", "Most tokens that the KV cache holds; older ones are dropped. Default: all.", type=int),
        flag("--prompt-cache-file", "Prompt cache from outcore cache-prompt or mlx_lm.cache_prompt.", metavar="FILE"),
        flag("--kv-bits", "Quantize the KV cache to this many bits. Default: do not quantize.", type=int),
        flag("--kv-group-size", "Group size of the quantized KV cache.", 64),
        flag("--quantized-kv-start", "Token from which the KV cache is quantized.", 5000),
        _option("prefix_cache"),
        _option("prefill_step_size"),
        switch("--quantize-activations -qa", "Quantize activations too, if the model's quantization supports it."),
    ),
    *_ENGINE,
    # Not for commands that serve several requests: they reserve memory request by request.
    _option("priority").but(group="engine"),
    *grouped(
        "drafts (speculative decoding: several tokens per forward pass, the same text)",
        # --draft-model is mlx-lm's name. The default None tells a flag that was not given from ``auto``.
        _option("draft", "--draft-model", default=None),
        flag("--num-draft-tokens", "Draft at most N tokens. Default: as many as pay.", type=int, metavar="N"),
    ),
    flag("--input -i", "File of requests, one JSON object per line.", type=Path, required=True, metavar="FILE"),
    flag("--output -o", "File to write.", type=Path, metavar="FILE"),
    flag("--decode-concurrency --concurrency", "Most requests that are answered at the same time.", 32, metavar="N"),
    flag("--repeats --num-trials -n", "Timed runs; the median counts.", 3),
    switch("--force --overwrite", "Replace existing files."),
    *_OUTPUT,
]

FLAGS = {each.name: each for each in _FLAGS}

OPTIONS = [name for name in LoadOptions.__dataclass_fields__ if name.replace("_", "-") in FLAGS and name != "prompt"]
"""Fields of ``LoadOptions`` that have a flag. ``--prompt`` is the prompt's text, not that field."""

GROUPS = {
    "engine-flags": [each.name for each in _ENGINE],
    "output-flags": [each.name for each in _OUTPUT],
    "model-flags": ["model_named", "model", "revision", "trust-remote-code"],
}


def named(listed: Iterable[str | Flag]) -> Iterator[Flag]:
    """Yields a command's flags, looking up names of ``FLAGS`` and ``GROUPS`` that are separated by spaces."""
    for each in listed:
        if isinstance(each, Flag):
            yield each
        else:
            for name in each.split():
                yield from (FLAGS[one] for one in GROUPS.get(name, [name]))
