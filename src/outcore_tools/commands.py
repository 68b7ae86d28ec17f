"""The commands that this package brings, as ``outcore.cli.commands`` finds them. Light: no MLX."""

from __future__ import annotations

from typing import Any

from outcore.cli.commands import CARE, HUB, LOOK, Command


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
        CARE,
    ),
    _command(
        "doctor",
        "Check in 20 seconds whether what Outcore relies on holds on this machine. Reads give the file's bytes, and "
        "come from the disk; slots are what the device sees; reading and computing overlap; streamed answers are the "
        "resident ones.",
        HUB,
        CARE,
        needs_model=False,
    ),
    _command(
        "pack",
        "Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where it was. "
        "Without --output it goes to the cache and is used whenever that model is loaded.",
        HUB,
        CARE,
    ),
    _command(
        "cache",
        "What packed copies, drafts, calibrations and more of that kind take: ls, rm, clear. Compiled kernels, marks "
        "that this machine was looked at, and what was computed of prompts are there, too. All of it is made again "
        "when it is needed; what is in use stays.",
        "ls",
        CARE,
    ),
    _command(
        "calibrate",
        "Measure this machine: its disk, and how long a model's layers take. It takes less than a minute, and is kept "
        "for this machine, device, disk and version of MLX.",
        HUB,
        CARE,
        needs_model=False,
    ),
    _command(
        "completion",
        "Print what lets a shell complete commands and flags. For zsh, save it as _outcore in a folder of $fpath.",
        "bash > ~/.local/share/bash-completion/completions/outcore",
        CARE,
    ),
])  # fmt: skip
