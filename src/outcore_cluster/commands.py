"""What this package brings to the command line, as ``outcore.cli.commands`` finds it. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import Command

COMMANDS = {
    "launch": Command(
        "run a command on several machines, each with a share of the model's layers",
        "outcore_cluster.launch.flags:setup_arg_parser",
        "outcore_cluster.launch.launch:run",
        launcher=True,
    )
}
RANK = "outcore_cluster.launch.as_rank"
