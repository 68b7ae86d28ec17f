"""The command ``batch``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, Command, Flag, switch
from outcore.cli.flags import FLAGS as SHARED

COMMANDS = {
    "batch": Command(
        "Answer a file of requests in OpenAI's batch format. As many as there is memory for share each forward pass, "
        "and new ones join as others finish. A run that was killed goes on with --resume.",
        "outcore_batch.command:run",
        "outcore_batch.commands:BATCH",
        f"{HUB} --memory 4GB --input requests.jsonl --output answers.jsonl",
    )
}

BATCH: list[str | Flag] = [
    "model-flags adapter-path input",
    SHARED["output"].but(help="Answers, one JSON a line.", required=True),
    SHARED["max-tokens"].but(default=512, help="Most tokens of an answer, unless the request has max_tokens."),
    "decode-concurrency exact-batch prefill-step-size force",
    switch("--resume", "Continue an existing output file."),
    "engine-flags output-flags",
]
