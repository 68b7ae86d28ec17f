"""The command ``embed``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import Command, Flag, flag, switch
from outcore.cli.flags import FLAGS as SHARED

HUB = "mlx-community/Qwen3-Embedding-0.6B-4bit-DWQ"

COMMANDS = {
    "embed": Command(
        "Compute vectors of texts, or rate documents, with an embedding or reranking model. Many texts share each "
        "reading of the weights. A run that was killed goes on with --resume.",
        "outcore_embed.command:run",
        "outcore_embed.commands:EMBED",
        f"{HUB} --memory 500MB --input texts.txt --output vectors.npy",
        extra="vision",
    )
}

EMBED: list[str | Flag] = [
    "model-flags",
    SHARED["input"].but(
        help="Texts, one a line, or JSON lines with text or input (a custom_id or id is kept); - for standard input."
    ),
    SHARED["output"].but(
        help="File of vectors: NAME.npy is an array of float32, any other name JSON lines. Default: JSON lines on "
        "standard output."
    ),
    flag(
        "--rerank", "Rate each text as an answer to this query, between 0 and 1, instead of vectors.", metavar="QUERY"
    ),
    flag("--instruction", "With --rerank: what to look for, for models that are language models."),
    flag(
        "--dimensions",
        "Keep the first N numbers of each vector, of length 1 again; for models trained for it. Default: all.",
        type=int,
        metavar="N",
    ),
    SHARED["prefill-step-size"].but(
        help="Tokens of texts computed at once. Default: 512, or the longest text.", group=""
    ),
    "force",
    switch("--resume", "Continue an existing output file."),
    "engine-flags output-flags",
]
