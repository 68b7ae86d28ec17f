"""The flags of ``outcore calibrate``. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import Flag
from outcore.cli.flags import FLAGS, MODEL

CALIBRATE: list[str | Flag] = [
    "model_named",
    FLAGS["model"].but(help=f"{MODEL} Default: none; the disk of the cache folder alone."),
    "revision trust-remote-code",
    *(FLAGS[name].but(group="") for name in ("dtype", "cpu-streams")),
    FLAGS["force"].but(help="Measure again what is known already."),
    "output-flags",
]
