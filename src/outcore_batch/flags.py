"""The flags of ``outcore batch``. Light: no MLX."""

from __future__ import annotations

from outcore.cli.flags import FLAGS
from outcore.cli.parser import Flag, switch

BATCH: list[str | Flag] = [
    "model-flags adapter-path input",
    FLAGS["output"].but(help="Answers, one JSON a line.", required=True),
    FLAGS["max-tokens"].but(default=512, help="Most tokens of an answer, where a request does not say."),
    "decode-concurrency prefill-step-size force",
    switch("--resume", "Go on with an output that is there already."),
    "engine-flags output-flags",
]
