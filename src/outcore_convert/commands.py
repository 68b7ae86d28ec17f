"""The command ``convert`` and its flags, which are those of ``mlx_lm.convert``. Imports no MLX."""

from __future__ import annotations

from pathlib import Path

from outcore.cli.commands import GET, Command, Flag, flag, switch
from outcore.cli.flags import FLAGS as SHARED

COMMANDS = {
    "convert": Command(
        "Quantize a model, or change its dtype, in a fraction of its memory. Flags, files and bits are those of "
        "mlx_lm.convert. The same command continues a conversion that was cut off.",
        "outcore_convert.command:run",
        "outcore_convert.commands:CONVERT",
        "Qwen/Qwen3-8B -q --memory 4GB",
        GET,
    )
}

RECIPES = ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6")

CONVERT: list[str | Flag] = [
    "model_named",
    SHARED["model"].but("--hf-path"),
    "revision trust-remote-code",
    SHARED["output"].but("--mlx-path", help="A new folder for the converted model.", default=Path("mlx_model")),
    switch("--quantize -q", "Quantize the weights."),
    flag("--q-group-size", "Weights that share a scale. Default: 64 (mxfp4, mxfp8: 32; nvfp4: 16).", type=int),
    flag("--q-bits", "Bits of a quantized weight. Default: 4 (mxfp8: 8).", type=int),
    flag("--q-mode", "How weights are quantized.", "affine", choices=("affine", "mxfp4", "nvfp4", "mxfp8")),
    flag("--quant-predicate", "Quantize some matrices to fewer bits than others.", choices=RECIPES),
    flag("--dtype", "dtype of the other weights. Default: config.json's.", choices=("float16", "bfloat16", "float32")),
    switch("--dequantize -d", "Turn quantized weights into floating-point numbers."),
    SHARED["memory"].but(
        group="",
        help="Memory of the whole process: 4GB, 1.5GiB, 50% of what may be used now, or auto. Default: OUTCORE_MEMORY, "
        "the configuration file's, or auto, from what is free.",
    ),
    "output-flags",
]
