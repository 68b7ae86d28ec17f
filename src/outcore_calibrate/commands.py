"""The command ``calibrate``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, KEEP, Command, Flag
from outcore.cli.flags import FLAGS as SHARED
from outcore.cli.flags import MODEL

COMMANDS = {
    "calibrate": Command(
        "Measure this machine: its disk, and how long a model's layers take. It takes less than a minute, and is kept "
        "for this machine, device, disk and version of MLX.",
        "outcore_calibrate.command:run",
        "outcore_calibrate.commands:CALIBRATE",
        HUB,
        KEEP,
        needs_model=False,
    )
}

CALIBRATE: list[str | Flag] = [
    "model_named",
    SHARED["model"].but(help=f"{MODEL} Default: none; the disk of the cache folder alone."),
    "revision trust-remote-code",
    *(SHARED[name].but(group="") for name in ("dtype", "cpu-streams")),
    SHARED["force"].but(help="Measure again what is known already."),
    "output-flags",
]
