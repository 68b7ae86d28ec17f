"""The flags of ``outcore batch``. Light: no MLX."""

from __future__ import annotations

from outcore.cli.flags import FLAGS, command_parser
from outcore.cli.parser import ArgumentParser, switch


def batch() -> ArgumentParser:
    """Its parser."""
    return command_parser(
        "outcore batch",
        "Answer a file of requests in OpenAI's batch format. As many as there is memory for share each sweep over the "
        "weights, and new ones join as others finish. A run that was killed goes on with --resume.",
        "outcore batch mlx-community/Qwen3-8B-4bit --memory 4GB --input requests.jsonl --output answers.jsonl",
        "model-flags adapter-path input",
        FLAGS["output"].but(help="Answers, one JSON a line.", required=True),
        FLAGS["max-tokens"].but(default=512, help="Most tokens of an answer, where a request does not say."),
        "decode-concurrency prefill-step-size force",
        switch("--resume", "Go on with an output that is there already."),
        "engine-flags",
    )
