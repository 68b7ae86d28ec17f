"""The command that this package brings, as ``outcore.cli.commands`` finds it. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, KEEP, Command

COMMANDS = {
    "pack": Command(
        "Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where it was. "
        "Without --output it goes to the cache and is used whenever that model is loaded.",
        "outcore_packs.command:run",
        "outcore_packs.flags:PACK",
        HUB,
        KEEP,
    )
}
