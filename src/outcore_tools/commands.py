"""The commands of this package (see ``outcore.cli.commands``). Imports no MLX."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from outcore.checks import choice
from outcore.cli.commands import GET, HUB, KEEP, LOG_LEVELS, LOOK, Command, Flag, commands, flag, parser_of
from outcore.cli.flags import FLAGS as SHARED
from outcore.cli.flags import PLANNED, QUANTIZED
from outcore.options import LoadOptions

ELSEWHERE = {
    "list": "info:list_models",
    "completion": "commands:completion",
    "monitor": "processes:monitor",
    "ps": "processes:ps",
    "stop": "processes:stop",
}


def _command(name: str, about: str, example: str, kind: str, **more: Any) -> tuple[str, Command]:
    run = f"outcore_tools.{name}:run" if name not in ELSEWHERE else f"outcore_tools.{ELSEWHERE[name]}"
    flags = f"outcore_tools.commands:{name.upper()}"
    return name, Command(about, run, flags, example, kind, **more)


_LEAVE_OUT = "outcore_tools.commands:leave_out"

COMMANDS = dict([
    _command(
        "pull",
        "Download a model from the Hugging Face Hub. Checks first that the disk has room. What is there already is not "
        "downloaded again.",
        HUB,
        GET,
        alone=_LEAVE_OUT,
    ),
    _command(
        "list",
        "List the models in the Hub's cache and in folders with short names. Shows the size on disk, the smallest "
        "budget, the budget that keeps everything resident, and whether the model streams here. Loads and downloads "
        "nothing.",
        "--memory 4GB",
        GET,
        alone=_LEAVE_OUT,
    ),
    _command(
        "info",
        "Show a model's layers and sizes, and what would be resident at a given --memory. Reads headers, and one "
        "block of each tensor to identify the model; loads nothing.",
        f"{HUB} --memory 4GB",
        GET,
        alone=_LEAVE_OUT,
    ),
    _command("ps", "List your running Outcore processes: model, memory, speed.", "", LOOK),
    _command("stop", "End a running Outcore process. outcore serve lets running answers end first.", "8123", LOOK),
    _command(
        "monitor",
        "Watch your running Outcore processes: layers, memory, disk, tokens. Ctrl-C leaves. Without a terminal, print "
        "the state once. --json prints four snapshots a second, one per line.",
        "",
        LOOK,
    ),
    _command(
        "demo",
        "Run the demo model in less memory than its weights need, and compare with the resident model.",
        "--memory 15MB",
        LOOK,
    ),
    _command(
        "doctor",
        "Check in 20 seconds that Outcore works on this machine. Reads return the file's bytes and bypass the page "
        "cache; the device sees what is read into a slot; streamed answers equal resident ones.",
        HUB,
        LOOK,
        needs_model=False,
    ),
    _command(
        "cache",
        "List or remove cached files: packed copies, drafts, calibrations, kernels, prompts (ls, rm, clear). They are "
        "made again when needed. Files in use are not removed.",
        "ls",
        KEEP,
    ),
    _command(
        "completion",
        "Print a script that makes a shell complete commands, flags and values. For zsh, save it as _outcore in a "
        "folder of $fpath; for fish, as ~/.config/fish/completions/outcore.fish.",
        "bash > ~/.local/share/bash-completion/completions/outcore",
        KEEP,
    ),
])  # fmt: skip


SHELLS, ACTIONS = ("bash", "zsh", "fish", "tcsh"), ("ls", "rm", "clear")

PULL: list[str | Flag] = ["model_named model revision output-flags"]

PS: list[str | Flag] = ["output-flags"]

STOP: list[str | Flag] = [
    flag("which", "The process, or the model that it runs.", nargs="?", metavar="PID | MODEL"),
    "output-flags",
]

_ANSWERS = "outcore chat MODEL talks with a model, outcore generate MODEL -p PROMPT answers once"
_REMOVES = "hf cache rm model/OWNER/NAME removes a model from the Hub's cache, outcore cache rm what Outcore made of it"
_CONVERTS = "models of the Hub are read as they are; outcore convert -q MODEL quantizes one"

# Commands of Ollama, LM Studio, mlx-lm and the Hub.
INSTEAD = {
    **dict.fromkeys(("run", "ask"), _ANSWERS),
    **dict.fromkeys(("rm", "remove", "delete"), _REMOVES),
    "quantize": _CONVERTS,
    **dict.fromkeys(("download", "get"), "outcore pull MODEL downloads a model"),
    **dict.fromkeys(("show", "inspect"), "outcore info MODEL shows a model's layers and sizes"),
    **dict.fromkeys(("ls", "models"), "outcore list lists the models"),
    **dict.fromkeys(("kill", "unload"), "outcore stop ends a running process"),
    "status": "outcore ps lists what runs",
    "start": "outcore serve MODEL starts a server",
    "create": "a Modelfile is used as it is: outcore chat --modelfile FILE",
    "version": "outcore --version shows it",
    "benchmark": "outcore bench measures a model",
}

# Flags of Ollama, llama.cpp, vLLM and transformers.
FLAGS_INSTEAD = {
    **dict.fromkeys(("c", "ctx-size", "num-ctx", "max-model-len"), ("--context", "--max-kv-size")),
    **dict.fromkeys(("n-predict", "num-predict", "max-new-tokens"), ("--max-tokens",)),
    **dict.fromkeys(("n-gpu-layers", "gpu-layers", "ngl", "gpu-memory-utilization"), ("--memory",)),
    **dict.fromkeys(("f", "file"), ("leave --prompt out and pipe the file in: < FILE",)),
    "p": ("--port", "outcore generate MODEL -p PROMPT answers one prompt"),
    "stream": ("answers are shown as they come",),
    "verbose": ("--log-level INFO tells more",),
    "api-key": ("write the key into a file (chmod 600) and give --api-key-file FILE, or set OUTCORE_API_KEY",),
}

INFO: list[str | Flag] = ["model-flags", *PLANNED, "engine-flags output-flags"]

LIST: list[str | Flag] = [
    SHARED["memory"].but(group="", help="Budget to compare with. Default: the budget that commands use by default."),
    SHARED["context"].but(group=""),
    "output-flags",
]

DEMO: list[str | Flag] = [
    SHARED["memory"].but(group="", help="Budget of the streamed run.", default="15MB"),
    SHARED["prompt"].but(default="def read_lines(path):\n", help="The prompt. Default: the first line of a function."),
    SHARED["max-tokens"].but(default=64, help="Tokens to generate."),
    "output-flags",
]

DOCTOR: list[str | Flag] = [
    "model_named",
    SHARED["model"].but(help="Check this model's files and plan as well. Default: none."),
    "revision output-flags",
]

MONITOR: list[str | Flag] = ["output-flags"]

CACHE: list[str | Flag] = [
    flag("action", "ls lists entries, largest first; rm removes some; clear removes all.", metavar="ls | rm | clear"),
    flag("names", "Entries to remove, by name or by the beginning of a name.", (), nargs="*", metavar="NAME"),
    SHARED["force"].but("--yes", "-y", help="Do not ask before clearing."),
    "output-flags",
]

COMPLETION: list[str | Flag] = [flag("shell", f"The shell: {', '.join(SHELLS)}.", metavar="SHELL")]


NAMES = {
    "transformers": ["AutoTokenizer", "PreTrainedTokenizer", "PreTrainedTokenizerFast"],
    "transformers.tokenization_utils_base": ["PreTrainedTokenizerBase"],
}


class _Tokenizer:
    @classmethod
    def register(cls, *args: Any, **kwargs: Any) -> None:
        """Does nothing, as no tokenizer is looked up."""

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("this process imported mlx-lm without tokenizers")


def leave_out() -> None:
    """Imports mlx-lm without transformers, which would take half of the time of ``outcore info``.

    On import mlx-lm names four classes of transformers; it uses them when a tokenizer is loaded. Stand-ins take their
    place. Later imports of transformers, for example by a model's own code, get the real module.
    """
    if "transformers" in sys.modules:
        return
    for module, classes in NAMES.items():
        sys.modules[module] = ModuleType(module)
        vars(sys.modules[module]).update(dict.fromkeys(classes, _Tokenizer))
    try:
        importlib.import_module("mlx_lm.utils")
    finally:
        for module in NAMES:
            del sys.modules[module]


def completion(args: argparse.Namespace) -> None:
    """Prints a shell's completion script for commands, flags, their values and files."""
    import shtab

    # The values that flags accept. The parsers do not list them as choices, so that errors are Outcore's own.
    words = {name: each.metadata["words"] for name, each in LoadOptions.__dataclass_fields__.items() if each.metadata}
    words |= {"log_level": LOG_LEVELS, "shell": SHELLS, "action": ACTIONS, **QUANTIZED, "prefix_cache": ("on", "off")}
    words["draft"] = "auto", "none", "ngram", "self", "mtp"
    choice("SHELL", args.shell, SHELLS)
    whole = argparse.ArgumentParser(prog="outcore")
    parsers = whole.add_subparsers()
    for name, command in commands().items():
        own = parser_of(name, everything=True)
        for action in own._actions:
            if words.get(action.dest) and not action.choices and "," not in str(action.default):
                action.choices = words[action.dest]
            elif action.type is Path or action.metavar == "FILE":
                action.complete = shtab.FILE  # type: ignore[attr-defined]
            elif action.metavar in ("MODEL", "DIR"):
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
        parsers.add_parser(name, help=command.help, parents=[own], add_help=False)
    print(shtab.complete(whole, args.shell))
