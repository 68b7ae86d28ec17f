"""The command ``pack``, as ``outcore.cli.commands`` finds it. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import HUB, KEEP, Command, Flag, flag
from outcore.cli.flags import FLAGS as SHARED

COMMANDS = {
    "pack": Command(
        "Copy a model into the aligned layout that reads fastest. An interrupted pack resumes. "
        "Without --output the copy goes to the cache and is used whenever that model is loaded.",
        "outcore_packs.command:run",
        "outcore_packs.commands:PACK",
        HUB,
        KEEP,
    )
}

PACK: list[str | Flag] = [
    "model-flags",
    SHARED["output"].but(help="A new folder, which can then be given as --model. Default: the cache.", metavar="DIR"),
    SHARED["force"].but(help="Pack again, even if there is a copy."),
    flag(
        "--coding",
        "compact: store the layers' bf16 matrices in three quarters of their bytes and decode them in each pass, to "
        "the same bits. planes:BITS: store the BITS high bits of quantized weights apart, so that --draft self:BITS "
        "keeps them in memory to draft with and streams only the low bits; makes that draft, too. plain: store "
        "weights as they are used. auto: compact on a GPU, plain on a CPU, which decodes too slowly.",
        "auto",
    ),
    "output-flags",
]
