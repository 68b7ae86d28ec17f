"""The command ``pack``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, KEEP, Command

COMMANDS = {
    "pack": Command(
        "Copy a model into the aligned layout that reads fastest. An interrupted pack resumes. "
        "Without --output the copy goes to the cache and is used whenever that model is loaded.",
        "outcore_packs.command:run",
        "outcore_packs.flags:PACK",
        HUB,
        KEEP,
    )
}
