"""The flags of ``outcore cache-prompt``."""

from __future__ import annotations

from ..arguments import add_engine_arguments, add_model_argument, add_output_arguments
from ..parser import ArgumentParser
from ..text_arguments import add_quantized_cache_arguments, add_window_arguments


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore cache-prompt",
        example='outcore cache-prompt mlx-community/Qwen3-8B-4bit -p "A text" --prompt-cache-file text.safetensors',
        description="Compute a prompt once, and keep what the model makes of it in a file that outcore generate and "
        "mlx_lm.generate go on from with --prompt-cache-file.",
    )
    add_model_argument(parser, adapter=True)
    parser.add_argument("--prompt", "-p", required=True, help="The prompt; - reads it from standard input.")
    parser.add_argument(
        "--prompt-cache-file", required=True, metavar="FILE", help="Where to keep it; its name ends in .safetensors."
    )
    parser.add_argument(
        "--eos-token",
        help="The token that ends an answer, for whoever goes on from the file. Default: the tokenizer's.",
    )
    add_window_arguments(parser, eviction=False)
    add_quantized_cache_arguments(parser)
    add_engine_arguments(parser)
    add_output_arguments(parser)
    return parser
