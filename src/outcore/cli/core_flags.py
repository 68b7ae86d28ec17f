"""The flags of the core's own commands, one list per command. Imports no MLX, which takes a second."""

from __future__ import annotations

from pathlib import Path

from .flags import FLAGS, MODEL, SETTLED
from .parser import Flag, flag, grouped, switch

_SAMPLING = "temp top-p top-k min-p xtc-probability xtc-threshold"
_CACHE = "kv-bits kv-group-size quantized-kv-start"
_DRAFT = "draft num-draft-tokens"
_ROOM = "longer texts get room when they come. Default: 2048, or what fits"

PLANNED = (FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), FLAGS["draft"])

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
    FLAGS["prompt"].but(default="hello"),
    FLAGS["max-tokens"].but(default=100),
    "system-prompt chat-template-config extra-eos-token prefill-response ignore-chat-template",
    flag(
        "--verbose",
        "False or F: print only the answer, no summary.",
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
    f"engine-flags priority {_DRAFT} output-flags",
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
    flag("--eos-token", "End-of-answer token to store in the file. Default: the tokenizer's."),
    f"max-kv-size prefill-step-size {_CACHE} engine-flags output-flags",
]

PLAN: list[str | Flag] = [
    "model-flags",
    *PLANNED,
    switch("--no-calibrate", "Do not measure this machine; predict from assumptions where it was not measured."),
    "engine-flags priority output-flags",
]
