"""The command ``launch``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command

COMMANDS = {
    "launch": Command(
        "Run a command on several machines, each with a share of the model's layers. Checks first that all hosts can "
        "be reached and have the same versions; the ranks then check that they have the same model. Exits with 0 if "
        "all ranks did, 1 if one failed, 130 after Ctrl-C. No rank keeps running afterwards.",
        "outcore_cluster.launch.launch:run",
        "outcore_cluster.launch.flags:LAUNCH",
        f"--hosts local,mini.local -- generate {HUB} --memory 16GB",
        "several machines",
        launcher=True,
    )
}
RANK = "outcore_cluster.launch.as_rank"
