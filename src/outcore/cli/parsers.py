"""The parsers of the core's own commands. Imports no MLX, which takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .flags import FLAGS, MODEL, SETTLED, command_parser
from .parser import ArgumentParser, Flag, flag, grouped, switch

SHELLS, ACTIONS = ("bash", "zsh", "tcsh"), ("ls", "rm", "clear")
DEMO_PROMPT, DEMO_BUDGET = "def read_lines(path):\n", "15MB"

CHAT_KEYS = "q quit, r reset the conversation, h this help; Ctrl-C stops an answer, Ctrl-D quits"
CHAT_FILES = "/save FILE and /load FILE keep the conversation"
CHAT_LINES = "/help is h, /bye is q; each line is a message"
CHAT_TYPED = (
    "/help is h, /bye is q; Esc Enter, or \\ at the end, begins another line, and what is pasted is one message"
)

TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"
"""Set where standard input is lines that somebody types at a launcher elsewhere."""

_HUB = "mlx-community/Qwen3-8B-4bit"
_COMMON = "model max-tokens system-prompt temp top-p seed memory draft"
_SAMPLING = "temp top-p top-k min-p xtc-probability xtc-threshold"
_CACHE = "kv-bits kv-group-size quantized-kv-start"
_DRAFT = "draft num-draft-tokens"

_PLANNED = (FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), FLAGS["draft"])
_ROOM = "room for more is made as they come. Default: 2048, or what fits"
_SAY = "where a request does not say"


def _tokens(most: int, **more: Any) -> Flag:
    return FLAGS["max-tokens"].but(default=most, **more)


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

_COMMANDS: dict[str, list[str | Flag]] = {
    "generate": [
        "Answer a prompt.",
        f"{_HUB} --memory 4GB --prompt 'Why is the sky blue?'",
        "model-flags adapter-path",
        FLAGS["prompt"].but(default="hello"),
        _tokens(100),
        "system-prompt chat-template-config extra-eos-token prefill-response ignore-chat-template",
        flag(
            "--verbose",
            "False or F: print the answer alone, without a summary.",
            type=lambda text: text.lower() not in ("false", "f"),
            default=True,
        ),
        f"{_SAMPLING} min-tokens-to-keep seed max-kv-size prompt-cache-file {_CACHE}",
        f"prefix-cache prefill-step-size quantize-activations engine-flags priority {_DRAFT}",
    ],
    "chat": [
        f"Converse with a model. {CHAT_KEYS}. {CHAT_FILES}, {CHAT_TYPED}. What is piped in is a message a line.",
        f"{_HUB} --memory 4GB",
        "model-flags adapter-path",
        _tokens(256),
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
        f"engine-flags priority {_DRAFT}",
    ],
    "serve": [
        "Answer clients of OpenAI's, Anthropic's and Ollama's APIs. Requests share each sweep over the weights; one "
        "alone has drafts, several where these pay. Flags are those of mlx_lm.server where it has them.",
        f"{_HUB} --memory 4GB",
        flag("models_named", "The same as --model MODEL.", nargs="*", metavar="MODEL"),
        FLAGS["model"].but(
            action="append",
            help=f"{MODEL} A folder of models stands for all of them. Again for further ones, which are loaded "
            f"when they are asked for.{SETTLED}",
        ),
        "revision trust-remote-code adapter-path",
        *_NETWORK,
        _tokens(512).but(group=_SAY),
        *(FLAGS[name].but(group=_SAY) for name in ("temp", "top-p", "top-k", "min-p", "chat-template-config")),
        flag("--chat-template", "A chat template in place of the models' own. Default: theirs.").but(group=_SAY),
        FLAGS["decode-concurrency"].but(group="capacity"),
        flag(
            "--max-context",
            "Tokens at most of a prompt and its answer; longer prompts are refused, answers end there. Default: as "
            "many as the model was made for, where its config.json says so.",
            type=int,
            metavar="N",
        ).but(group="capacity"),
        FLAGS["context"].but(group="capacity", help=f"Tokens of prompt and answer to reserve memory for; {_ROOM}."),
        FLAGS["prefix-cache"].but(group="capacity", default="on"),
        f"prefill-step-size engine-flags {_DRAFT}",
    ],
    "plan": [
        "What would be resident at a budget, how fast it would be and what it would take, item by item; and speed "
        "against memory from the smallest budget to everything resident. Loads nothing. The first time, this machine "
        "is measured, which takes up to a minute.",
        f"{_HUB} --memory 4GB",
        "model-flags",
        *_PLANNED,
        switch("--no-calibrate", "Do not measure; predict from assumptions where nothing is known."),
        "engine-flags priority",
    ],
    "info": [
        "What a model weighs and what would be resident at a budget. Loads nothing: headers are read, and a block of "
        "each tensor to know the model by.",
        f"{_HUB} --memory 4GB",
        "model-flags",
        *_PLANNED,
        "engine-flags",
    ],
    "list": [
        "The models in the Hugging Face Hub's cache: what each takes on the disk, the smallest budget that it runs in, "
        "the one from which all of it is resident, and what it would do here. Loads and fetches nothing.",
        "--memory 4GB",
        flag("--cache-dir", "Another cache of the Hub. Default: the Hub's own.", metavar="DIR"),
        FLAGS["memory"].but(group="", help="The budget to compare with. Default: what would be used."),
        FLAGS["context"].but(group=""),
    ],
    "demo": [
        "Run the demo model under a budget smaller than its weights, and check it against the resident one.",
        "--memory 15MB",
        FLAGS["memory"].but(group="", help="The streamed run's budget.", default=DEMO_BUDGET),
        FLAGS["prompt"].but(default=DEMO_PROMPT, help="The prompt. Default: the head of a function."),
        _tokens(64, help="Tokens to generate."),
        "repeats",
    ],
    "doctor": [
        "Check in 20 seconds whether what Outcore relies on holds here: reads give the file's bytes, and come from the "
        "disk; slots are what the device sees; reading and computing overlap; streamed answers are the resident ones.",
        _HUB,
        FLAGS["model"].but(help="A model whose files and plan are looked at, too. Default: none."),
        "revision",
    ],
    "monitor": [
        "Show what your running Outcore processes do: layers, memory, the disk, tokens. Ctrl-C leaves. With --json a "
        "snapshot a line, four times a second.",
        "--once",
        switch("--once", "Show it once, after a second, and end."),
    ],
    "pack": [
        "Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where it was. "
        "Without --output it goes to the cache and is used whenever that model is loaded.",
        _HUB,
        "model-flags",
        FLAGS["output"].but(help="A folder that can then be given as --model. Default: the cache.", metavar="DIR"),
        FLAGS["force"].but(help="Pack again, even where a copy is there."),
        flag(
            "--coding",
            "compact: store layers' bf16 matrices in three quarters of their bytes; decoded in each sweep, to the "
            "same bits. planes:BITS: of quantized layers so many high bits lie apart, so that --draft self:BITS "
            "drafts with them and reads the others alone, with nothing written twice; that draft is made, too. "
            "plain: as they are used. auto: compact on a GPU, plain on a processor, which decodes too slowly.",
            default="auto",
        ),
        FLAGS["draft"].but(
            group="",
            metavar="self:BITS",
            help="Make the low-bit copy too that drafts for the model with --draft self:BITS; else it is made when "
            "first asked for. Default: none.",
        ),
    ],
    "cache": [
        "What Outcore made once and keeps: packed copies, self drafts, calibrations, compiled kernels, marks that this "
        "machine was looked at, and what was computed of prompts. All of it is made again when it is needed; what is "
        "in use stays.",
        "ls",
        flag("action", "Show what there is, largest first; remove some; remove all.", metavar="ls | rm | clear"),
        flag(
            "names", "What rm removes: as ls shows it, or a beginning that only one has.", (), nargs="*", metavar="NAME"
        ),
        FLAGS["force"].but("--yes", "-y", help="Do not ask before all of it is removed."),
    ],
    "cache-prompt": [
        "Compute a prompt once, and keep what the model makes of it in a file that outcore generate and "
        "mlx_lm.generate go on from with --prompt-cache-file.",
        f'{_HUB} -p "A text" --prompt-cache-file text.safetensors',
        "model-flags adapter-path",
        FLAGS["prompt"].but(required=True),
        FLAGS["prompt-cache-file"].but(
            group="", required=True, help="Where to keep it; its name ends in .safetensors."
        ),
        flag(
            "--eos-token",
            "The token that ends an answer, for whoever goes on from the file. Default: the tokenizer's.",
        ),
        f"max-kv-size prefill-step-size {_CACHE} engine-flags",
    ],
    "calibrate": [
        "Measure the disk that a model is on and how long its layers take, in under a minute; kept for this machine, "
        "device, disk and version of MLX.",
        _HUB,
        FLAGS["model"].but(help=f"{MODEL} Default: none; the disk of the cache folder alone."),
        "revision trust-remote-code",
        *(FLAGS[name].but(group="") for name in ("dtype", "cpu-streams")),
        FLAGS["force"].but(help="Measure again what is known already."),
    ],
    "completion": [
        "Print what lets a shell complete Outcore's commands and flags. For zsh, save it as _outcore in a folder of "
        "$fpath.",
        "bash > ~/.local/share/bash-completion/completions/outcore",
        flag("shell", f"{', '.join(SHELLS)}.", metavar="SHELL"),
    ],
}
"""For each command: its description, what an example gives it, and its flags."""

_MORE: dict[str, dict[str, Any]] = {
    "generate": {"common": f"{_COMMON} prompt prefix-cache max-kv-size kv-bits adapter-path json quiet"},
    "chat": {"common": f"{_COMMON} session context prefix-cache max-kv-size adapter-path json quiet"},
    "serve": {
        "common": "model host port api-key-file max-tokens temp top-p decode-concurrency context prefix-cache "
        "memory draft adapter-path json quiet"
    },
    "doctor": {"needs_model": False},
    "calibrate": {"needs_model": False},
    "completion": {"output": ""},
}
"""Further arguments of ``command_parser``."""


def core_parser(name: str) -> ArgumentParser:
    """The parser of a command of the core."""
    description, example, *flags = _COMMANDS[name]
    prog, more = f"outcore {name}", _MORE.get(name, {})
    parser = command_parser(prog, str(description), f"{prog} {example}", *flags, **more)
    parser.runs_model |= name == "list"
    return parser
