"""The flags of ``outcore pack``. Imports no MLX."""

from __future__ import annotations

from outcore.cli.flags import FLAGS
from outcore.cli.parser import Flag, flag

PACK: list[str | Flag] = [
    "model-flags",
    FLAGS["output"].but(help="A folder that can then be given as --model. Default: the cache.", metavar="DIR"),
    FLAGS["force"].but(help="Pack again, even where a copy is there."),
    flag(
        "--coding",
        "compact: store layers' bf16 matrices in three quarters of their bytes; decoded in each sweep, to the same "
        "bits. planes:BITS: of quantized layers so many high bits lie apart, so that --draft self:BITS drafts with "
        "them and reads the others alone, with nothing written twice; that draft is made, too. plain: as they are "
        "used. auto: compact on a GPU, plain on a processor, which decodes too slowly.",
        "auto",
    ),
    "output-flags",
]
