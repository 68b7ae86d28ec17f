"""What this package brings to the command line, as ``outcore.cli.commands`` finds it. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command

COMMANDS = {
    "launch": Command(
        "Run a command on several machines, each with a share of the model's layers. Looks first whether they can be "
        "reached and have the same versions; ranks compare the model when they meet. Ends with 0 if all of them did, "
        "with 1 if one failed, and 130 after Ctrl-C; whatever happens, nothing keeps running.",
        "outcore_cluster.launch.launch:run",
        "outcore_cluster.launch.flags:LAUNCH",
        f"--hosts local,mini.local -- generate {HUB} --memory 16GB",
        "several machines",
        launcher=True,
    )
}
RANK = "outcore_cluster.launch.as_rank"
