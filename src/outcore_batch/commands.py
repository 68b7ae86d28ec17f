"""The command ``batch``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command

COMMANDS = {
    "batch": Command(
        "Answer a file of requests in OpenAI's batch format. As many as there is memory for share each forward pass, "
        "and new ones join as others finish. A run that was killed goes on with --resume.",
        "outcore_batch.command:run",
        "outcore_batch.flags:BATCH",
        f"{HUB} --memory 4GB --input requests.jsonl --output answers.jsonl",
    )
}
