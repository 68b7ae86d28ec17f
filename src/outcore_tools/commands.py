"""The commands of this package (see ``outcore.cli.commands``). Imports no MLX."""

from __future__ import annotations

from typing import Any

from outcore.cli.commands import HUB, KEEP, LOOK, Command


def _command(name: str, about: str, example: str, kind: str, **more: Any) -> tuple[str, Command]:
    run, flags = f"outcore_tools.{name}:run", f"outcore_tools.flags:{name.upper()}"
    return name, Command(about, run, flags, example, kind, **more)


_LEAVE_OUT = "outcore_tools.no_tokenizers:leave_out"

COMMANDS = dict([
    _command(
        "info",
        "Show a model's layers and sizes, and what would be resident at a given --memory. Reads headers, and one "
        "block of each tensor to identify the model; loads nothing.",
        f"{HUB} --memory 4GB",
        LOOK,
        alone=_LEAVE_OUT,
    ),
    _command(
        "list",
        "List the models in the Hub's cache and the memory that each needs. Shows the size on disk, the smallest "
        "budget, the budget that keeps everything resident, and whether the model streams here. Loads and downloads "
        "nothing.",
        "--memory 4GB",
        LOOK,
        alone=_LEAVE_OUT,
    ),
    _command(
        "monitor",
        "Watch your running Outcore processes: layers, memory, disk, tokens. Ctrl-C leaves. --json prints four "
        "snapshots a second, one per line.",
        "--once",
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
        "cache; the device sees what is read into a slot; reading and computing overlap; streamed answers equal "
        "resident ones.",
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
        "Print a script that makes a shell complete commands and flags. For zsh, save it as _outcore in a folder of "
        "$fpath.",
        "bash > ~/.local/share/bash-completion/completions/outcore",
        KEEP,
    ),
])  # fmt: skip
