"""The flags of the core's own commands, a list for each. Imports no MLX, which takes a second."""

from __future__ import annotations

from pathlib import Path

from .flags import FLAGS, MODEL, SETTLED
from .parser import Flag, flag, grouped, switch

_SAMPLING = "temp top-p top-k min-p xtc-probability xtc-threshold"
_CACHE = "kv-bits kv-group-size quantized-kv-start"
_DRAFT = "draft num-draft-tokens"
_ROOM = "room for more is made as they come. Default: 2048, or what fits"
_SAY = "where a request does not say"

PLANNED = (FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), FLAGS["draft"])
"""What a plan is made for."""

_NETWORK = grouped(
    "network",
    flag("--host", "Where to listen. Others than this machine need --api-key-file or --insecure.", "127.0.0.1"),
    flag("--port", "0 takes one that is free.", 8080),
    flag(
        "--api-key-file",
        "A file, for your eyes alone (chmod 600), that holds the key that requests must carry, as Bearer or x-api-key. "
        "Default: the key in OUTCORE_API_KEY, or none.",
        type=Path,
        metavar="FILE",
    ),
    switch("--insecure", "Let whoever reaches this machine ask, without a key."),
    flag("--allowed-hosts", "Further names, with commas, that it may be called by; * for any.", metavar="NAMES"),
    flag(
        "--allowed-origins",
        "Web pages, separated by commas, that may ask and read the answers, such as http://localhost:3000; localhost "
        "for all of this machine's, * for any. Default: none (mlx_lm.server: any).",
        metavar="ORIGINS",
    ),
    flag(
        "--drain",
        "Seconds from Ctrl-C or SIGTERM to the end of the process, at most. Answers under way may go on until 2 "
        "seconds before; of less than 4, for half. A second Ctrl-C ends them at once.",
        30.0,
        metavar="SECONDS",
    ),
)

GENERATE: list[str | Flag] = [
    "model-flags adapter-path",
    FLAGS["prompt"].but(default="hello"),
    FLAGS["max-tokens"].but(default=100),
    "system-prompt chat-template-config extra-eos-token prefill-response ignore-chat-template",
    flag(
        "--verbose",
        "False or F: print the answer alone, without a summary.",
        type=lambda text: text.lower() not in ("false", "f"),
        default=True,
    ),
    f"{_SAMPLING} min-tokens-to-keep seed max-kv-size prompt-cache-file {_CACHE}",
    f"prefix-cache prefill-step-size quantize-activations engine-flags priority {_DRAFT} output-flags",
]

CHAT: list[str | Flag] = [
    "model-flags adapter-path",
    FLAGS["max-tokens"].but(default=256),
    f"system-prompt chat-template-config extra-eos-token {_SAMPLING}",
    FLAGS["seed"].but(help="Seed of the random numbers: the same answers, drafted or not.", default=0),
    FLAGS["context"].but(help=f"Tokens of conversation to reserve memory for; {_ROOM}; 256 over several machines."),
    flag(
        "--session",
        "Go on with the conversation of that name, and keep it; nothing of it is computed again, as long as "
        "the prefix cache has room for it.",
        metavar="NAME",
    ).but(group="context"),
    "max-kv-size prefill-step-size",
    FLAGS["prefix-cache"].but(default="on"),
    f"engine-flags priority {_DRAFT} output-flags",
]

SERVE: list[str | Flag] = [
    flag("models_named", "The same as --model MODEL.", nargs="*", metavar="MODEL"),
    FLAGS["model"].but(
        action="append",
        help=f"{MODEL} A folder of models stands for all of them. Again for further ones, which are loaded "
        f"when they are asked for.{SETTLED}",
    ),
    "revision trust-remote-code adapter-path",
    *_NETWORK,
    *grouped(
        _SAY,
        FLAGS["max-tokens"].but(default=512),
        *(FLAGS[name] for name in ("temp", "top-p", "top-k", "min-p", "chat-template-config")),
        flag("--chat-template", "A chat template in place of the models' own. Default: theirs."),
    ),
    *grouped(
        "capacity",
        FLAGS["decode-concurrency"],
        flag(
            "--max-context",
            "Tokens at most of a prompt and its answer; longer prompts are refused, answers end there. Default: as "
            "many as the model was made for, where its config.json says so.",
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
    FLAGS["prompt-cache-file"].but(group="", required=True, help="Where to keep it; its name ends in .safetensors."),
    flag("--eos-token", "The token that ends an answer, for whoever goes on from the file. Default: the tokenizer's."),
    f"max-kv-size prefill-step-size {_CACHE} engine-flags output-flags",
]

PLAN: list[str | Flag] = [
    "model-flags",
    *PLANNED,
    switch("--no-calibrate", "Do not measure; predict from assumptions where nothing is known."),
    "engine-flags priority output-flags",
]
