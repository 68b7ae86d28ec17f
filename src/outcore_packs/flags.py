"""The flags of ``outcore pack``. Imports no MLX."""

from __future__ import annotations

from outcore.cli.commands import Flag, flag
from outcore.cli.flags import FLAGS

PACK: list[str | Flag] = [
    "model-flags",
    FLAGS["output"].but(help="A new folder, which can then be given as --model. Default: the cache.", metavar="DIR"),
    FLAGS["force"].but(help="Pack again, even if there is a copy."),
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
