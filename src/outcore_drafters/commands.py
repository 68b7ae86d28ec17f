"""The command ``draft``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import GET, HUB, Command

COMMANDS = {
    "draft": Command(
        "Train a small drafter for a model, on the model's own continuations of your text. An interrupted training "
        "resumes with the same command. Then use it with --draft DIR.",
        "outcore_drafters.command:run",
        "outcore_drafters.flags:DRAFT",
        f"train --model {HUB} --input notes/ src/ --output drafter --memory 4GB",
        GET,
        last=True,
    )
}
