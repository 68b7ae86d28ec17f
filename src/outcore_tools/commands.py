"""The commands that this package brings, as ``outcore.cli.commands`` finds them. Light: no MLX."""

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
        "Layers, sizes, and what would be resident at a given --memory. Loads nothing: headers are read, and a block "
        "of each tensor to know the model by.",
        f"{HUB} --memory 4GB",
        LOOK,
        alone=_LEAVE_OUT,
    ),
    _command(
        "list",
        "Models in the Hub's cache, and what each would need here. Of each: what it takes on the disk, the smallest "
        "budget that it runs in, the one from which all of it is resident, and what it would do. Loads and fetches "
        "nothing.",
        "--memory 4GB",
        LOOK,
        alone=_LEAVE_OUT,
    ),
    _command(
        "monitor",
        "What your running Outcore processes do: layers, memory, the disk, tokens. Ctrl-C leaves. With --json a "
        "snapshot a line, four times a second.",
        "--once",
        LOOK,
    ),
    _command(
        "demo",
        "Run the demo model under a budget smaller than its weights, and check it against the resident one.",
        "--memory 15MB",
        LOOK,
    ),
    _command(
        "doctor",
        "Check in 20 seconds whether what Outcore relies on holds on this machine. Reads give the file's bytes, and "
        "come from the disk; slots are what the device sees; reading and computing overlap; streamed answers are the "
        "resident ones.",
        HUB,
        LOOK,
        needs_model=False,
    ),
    _command(
        "cache",
        "What packed copies, drafts, calibrations and more of that kind take: ls, rm, clear. Compiled kernels, marks "
        "that this machine was looked at, and what was computed of prompts are there, too. All of it is made again "
        "when it is needed; what is in use stays.",
        "ls",
        KEEP,
    ),
    _command(
        "completion",
        "Print what lets a shell complete commands and flags. For zsh, save it as _outcore in a folder of $fpath.",
        "bash > ~/.local/share/bash-completion/completions/outcore",
        KEEP,
    ),
])  # fmt: skip
