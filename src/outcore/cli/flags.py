"""The flags that commands share, each declared once. Flags that set a field of ``LoadOptions`` take type, default and
help from there. Imports no MLX."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..checks import whole
from ..errors import UsageError
from ..options import AUTO, LoadOptions, said_of
from ..text import half_character, one_line
from .commands import LOG_LEVELS, Flag, flag, grouped, switch

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
        flag(
            "--xtc-probability", "Probability of leaving out all but the least likely of the likely tokens (XTC).", 0.0
        ),
        flag("--xtc-threshold", "Probability from which XTC counts a token as likely.", 0.1),
        flag("--min-tokens-to-keep", "Fewest tokens that --min-p leaves.", 1),
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
    *grouped(
        "drafts (speculative decoding: several tokens per forward pass, the same text)",
        # --draft-model is mlx-lm's name. The default None tells a flag that was not given from ``auto``.
        _option("draft", "--draft-model", default=None),
        _option("draft_bits"),
        flag("--num-draft-tokens", "Draft at most N tokens. Default: as many as speed up.", type=int, metavar="N"),
    ),
    flag("--input -i", "File of requests, one JSON object per line.", type=Path, required=True, metavar="FILE"),
    flag("--output -o", "File to write.", type=Path, metavar="FILE"),
    flag("--decode-concurrency --concurrency", "Most requests that are answered at the same time.", 32, metavar="N"),
    switch("--exact-batch", said_of("exact_batch")),
    flag("--repeats --num-trials -n", "Number of timed runs; the median is reported.", 3),
    switch("--force --overwrite", "Replace existing files."),
    *_OUTPUT,
]

FLAGS = {each.name: each for each in _FLAGS}

# Fields of ``LoadOptions`` that have a flag. ``--prompt`` is the prompt's text, not that field.
OPTIONS = [name for name in LoadOptions.__dataclass_fields__ if name.replace("_", "-") in FLAGS and name != "prompt"]

GROUPS = {
    "engine-flags": [each.name for each in _ENGINE],
    "output-flags": [each.name for each in _OUTPUT],
    "model-flags": ["model_named", "model", "revision", "trust-remote-code"],
    "sampling-flags": [each.name for each in _FLAGS if each.group == "sampling" and each.name != "seed"],
}


def named(listed: Iterable[str | Flag]) -> Iterator[Flag]:
    for each in listed:
        if isinstance(each, Flag):
            yield each
        else:
            for name in each.split():
                yield from (FLAGS[one] for one in GROUPS.get(name, [name]))


QUANTIZED = {"kv_bits": (2, 3, 4, 5, 6, 8), "kv_group_size": (32, 64, 128)}


def loading_options(args: argparse.Namespace) -> dict[str, Any]:
    given = {name: getattr(args, name) for name in (*OPTIONS, "trust_remote_code", "ranks") if hasattr(args, name)}
    if "draft" in given:
        given["draft"] = args.draft or AUTO
    if getattr(args, "image", None):
        given["images"] = True
    if hasattr(args, "prompt_tokens"):
        given["prompt"] = args.prompt_tokens
    return given


def sampling_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name, value in vars(args).items() if name.replace("_", "-") in GROUPS["sampling-flags"]}


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


_CACHE = "kv-bits kv-group-size quantized-kv-start"
_DRAFT = "draft draft-bits num-draft-tokens"
_ROOM = "longer texts get room when they come. Default: 2048, or what fits"

PLANNED = (FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), FLAGS["draft"], FLAGS["draft-bits"])

_NETWORK = grouped(
    "network",
    flag(
        "--host", "Address to listen on. One that other machines reach needs --api-key-file or --insecure.", "127.0.0.1"
    ),
    flag("--port", "Port to listen on; 0 picks a free one.", 8080),
    flag(
        "--api-key-file",
        "File with the key that requests must carry, as Bearer or x-api-key; only you may read it (chmod 600). "
        "Default: the key in OUTCORE_API_KEY, or none.",
        type=Path,
        metavar="FILE",
    ),
    switch("--insecure", "Serve other machines without a key."),
    flag(
        "--allowed-hosts", "Further host names, separated by commas, that requests may use; * for any.", metavar="NAMES"
    ),
    flag(
        "--allowed-origins",
        "Web pages, separated by commas, that may send requests, such as http://localhost:3000; localhost for all on "
        "this machine, * for any. Default: none (mlx_lm.server: any).",
        metavar="ORIGINS",
    ),
    flag(
        "--drain",
        "After Ctrl-C or SIGTERM, exit within this many seconds. Running answers may continue until 2 seconds before "
        "that (for half of the time, if it is less than 4). A second Ctrl-C stops them at once.",
        30.0,
        metavar="SECONDS",
    ),
)

GENERATE: list[str | Flag] = [
    "model-flags adapter-path",
    FLAGS["prompt"].but(
        help="The prompt; piped text follows it, or is the prompt. - reads it to its end. Default: the piped text."
    ),
    FLAGS["max-tokens"].but(default=100),
    "system-prompt chat-template-config extra-eos-token prefill-response ignore-chat-template",
    flag(
        "--verbose",
        "False or F: print only the answer, no summary.",
        type=lambda text: text.lower() not in ("false", "f"),
        default=True,
    ),
    f"sampling-flags seed max-kv-size prompt-cache-file {_CACHE}",
    f"prefix-cache prefill-step-size quantize-activations engine-flags {_DRAFT} output-flags",
]

CHAT: list[str | Flag] = [
    "model-flags adapter-path",
    FLAGS["max-tokens"].but(default=256),
    "system-prompt chat-template-config extra-eos-token",
    *(each for each in named(["sampling-flags"]) if each.name != "min-tokens-to-keep"),
    FLAGS["seed"].but(help="Random seed; the same seed gives the same answers, with or without drafts.", default=0),
    FLAGS["context"].but(help=f"Tokens of conversation to reserve memory for; {_ROOM}; 256 over several machines."),
    flag(
        "--session",
        "Save the conversation under this name, and continue it next time, without computing it again if the prefix "
        "cache still holds it.",
        metavar="NAME",
    ).but(group="context"),
    "max-kv-size prefill-step-size",
    FLAGS["prefix-cache"].but(default="on"),
    f"engine-flags {_DRAFT} output-flags",
]

SERVE: list[str | Flag] = [
    flag("models_named", "The same as --model MODEL.", nargs="*", metavar="MODEL"),
    FLAGS["model"].but(
        action="append",
        help=f"{MODEL} A folder of models serves all of them. Repeat the flag for more models; each is loaded when a "
        f"request names it.{SETTLED}",
    ),
    "revision trust-remote-code adapter-path",
    *_NETWORK,
    *grouped(
        "defaults for requests",
        FLAGS["max-tokens"].but(default=512),
        *(FLAGS[name] for name in ("temp", "top-p", "top-k", "min-p", "chat-template-config")),
        flag("--chat-template", "Chat template to use instead of the model's own. Default: the model's."),
    ),
    *grouped(
        "capacity",
        FLAGS["decode-concurrency"],
        FLAGS["exact-batch"],
        flag(
            "--max-context",
            "Most tokens of a prompt and its answer. Longer prompts are refused, longer answers cut off. Default: the "
            "model's maximum by its config.json.",
            type=int,
            metavar="N",
        ),
        FLAGS["context"].but(help=f"Tokens of prompt and answer to reserve memory for; {_ROOM}."),
        FLAGS["prefix-cache"].but(default="on"),
    ),
    f"prefill-step-size engine-flags {_DRAFT} output-flags",
]

CACHE_PROMPT: list[str | Flag] = [
    "model-flags adapter-path",
    FLAGS["prompt"].but(required=True),
    FLAGS["prompt-cache-file"].but(group="", required=True, help="File to write; its name ends in .safetensors."),
    f"max-kv-size prefill-step-size {_CACHE} engine-flags output-flags",
]

PLAN: list[str | Flag] = [
    "model-flags",
    *PLANNED,
    switch("--no-calibrate", "Do not measure this machine; predict from assumptions where it was not measured."),
    "engine-flags output-flags",
]
