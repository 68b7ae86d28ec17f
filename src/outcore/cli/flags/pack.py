"""The flags of ``outcore pack``."""

from __future__ import annotations

from pathlib import Path

from ..arguments import add_model_argument, add_output_arguments
from ..parser import ArgumentParser


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore pack",
        example="outcore pack mlx-community/Qwen3-8B-4bit",
        description="Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where "
        "it was. Without --output it goes to the cache and is used whenever that model is loaded.",
    )
    add_model_argument(parser)
    parser.add_argument(
        "--output", "-o", type=Path, help="A folder that can then be given as --model. Default: the cache."
    )
    parser.add_argument("--force", action="store_true", help="Pack again, even where a copy is there.")
    parser.add_argument(
        "--coding",
        metavar="CODING",
        default="auto",
        help="compact: store layers' bf16 matrices in three quarters of their bytes; decoded in each sweep, to the "
        "same bits. planes:BITS: of quantized layers so many high bits lie apart, so that --draft self:BITS drafts "
        "with them and reads the others alone, with nothing written twice; that draft is made, too. plain: as they are "
        "used. auto: compact on a GPU, plain on a processor, which decodes too slowly. Default: auto.",
    )
    parser.add_argument(
        "--draft",
        metavar="self:BITS",
        help="Make the low-bit copy too that drafts for the model with --draft self:BITS; else it is made when first "
        "asked for. Default: none.",
    )
    add_output_arguments(parser)
    return parser
