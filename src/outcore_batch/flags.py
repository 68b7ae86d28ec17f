"""The flags of ``outcore batch``. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import Flag, switch
from outcore.cli.flags import FLAGS

BATCH: list[str | Flag] = [
    "model-flags adapter-path input",
    FLAGS["output"].but(help="Answers, one JSON a line.", required=True),
    FLAGS["max-tokens"].but(default=512, help="Most tokens of an answer, unless the request has max_tokens."),
    "decode-concurrency exact-batch prefill-step-size force",
    switch("--resume", "Continue an existing output file."),
    "engine-flags output-flags",
]
