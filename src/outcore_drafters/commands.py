"""The command ``draft`` and its flags, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.commands import GET, HUB, Command, Flag, flag
from outcore.cli.flags import FLAGS as SHARED

COMMANDS = {
    "draft": Command(
        "Train a small drafter for a model, on the model's own continuations of your text. An interrupted training "
        "resumes with the same command. Then use it with --draft DIR.",
        "outcore_drafters.command:run",
        "outcore_drafters.commands:DRAFT",
        f"train --model {HUB} --input notes/ src/ --output drafter --memory 10GB",
        GET,
        last=True,
    )
}

DRAFT: list[str | Flag] = [
    flag("action", "train: collect the model's hidden states and train a drafter on them.", choices=["train"]),
    "model-flags",
    SHARED["input"].but(
        type=Path, nargs="+", required=True, help="Text to learn from: files, or folders whose text files are read."
    ),
    SHARED["output"].but(type=Path, required=True, help="Folder of the drafter; also holds what a resumed run needs."),
    flag("--disk", "Most bytes that this training writes to disk.", "20GB", metavar="SIZE"),
    flag("--minutes", "Longest time of collecting states, and of training after it.", 60.0, metavar="N"),
    flag(
        "--share",
        "Size of the drafter in 4 bits, as a share of the model's bytes. Default: the least that drafted as well as "
        "larger ones, by the model's width.",
        type=float,
        metavar="X",
    ),
    SHARED["max-tokens"].but(default=64, help="Tokens of each continuation."),
    SHARED["temp"].but(help="Temperature of the continuations; 0: greedy."),
    SHARED["seed"].but(help="Chooses the pieces of text and the first weights."),
    "engine-flags output-flags",
]
