"""What this package brings to the command line, as ``outcore.cli.commands`` finds it. Light: no MLX."""

from __future__ import annotations

from outcore.cli.commands import Command

COMMANDS = {
    "batch": Command(
        "answer a file of requests, many in each sweep over the weights",
        "outcore_batch.flags:batch",
        "outcore_batch.command:run",
    )
}
