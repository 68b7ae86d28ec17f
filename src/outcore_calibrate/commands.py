"""The command ``calibrate``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, KEEP, Command

COMMANDS = {
    "calibrate": Command(
        "Measure this machine: its disk, and how long a model's layers take. It takes less than a minute, and is kept "
        "for this machine, device, disk and version of MLX.",
        "outcore_calibrate.command:run",
        "outcore_calibrate.flags:CALIBRATE",
        HUB,
        KEEP,
        needs_model=False,
    )
}
