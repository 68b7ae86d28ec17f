"""The flags of ``outcore generate``."""

from __future__ import annotations

from ..arguments import (
    add_draft_arguments,
    add_engine_arguments,
    add_model_argument,
    add_output_arguments,
    add_prefix_cache_argument,
)
from ..parser import ArgumentParser
from ..text_arguments import (
    add_answer_arguments,
    add_quantized_cache_arguments,
    add_sampling_arguments,
    add_window_arguments,
)


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore generate",
        example="outcore generate mlx-community/Qwen3-8B-4bit --memory 4GB --prompt 'Why is the sky blue?'",
        description="Answer a prompt.",
    )
    add_model_argument(parser, adapter=True)
    parser.add_argument(
        "--prompt", "-p", default="hello", help="The prompt; - reads it from standard input. Default: hello."
    )
    add_answer_arguments(parser, max_tokens=100)
    parser.add_argument("--prefill-response", help="Beginning of the answer, for the chat template. Default: none.")
    parser.add_argument("--ignore-chat-template", action="store_true", help="Take the prompt as it is.")
    sampling = add_sampling_arguments(parser, "the same text, drafted or not. Default: another each time.")
    sampling.add_argument(
        "--min-tokens-to-keep", type=int, default=1, help="Tokens that --min-p leaves at least. Default: 1."
    )
    cache = parser.add_argument_group("context")
    add_window_arguments(cache)
    cache.add_argument(
        "--prompt-cache-file",
        help="A prompt cache saved by outcore cache-prompt or mlx_lm.cache_prompt; without --model, of the model that "
        "it was made with. Default: none.",
    )
    add_quantized_cache_arguments(cache)
    add_prefix_cache_argument(cache, on=False)
    cache.add_argument("--quantize-activations", "-qa", action="store_true", help="Where the quantization allows it.")
    add_engine_arguments(parser)
    add_draft_arguments(parser)
    parser.add_argument(
        "--verbose",
        type=_truth,
        default=True,
        help="False or F: print the answer alone, without a summary. Default: True.",
    )
    add_output_arguments(parser)
    return parser


def _truth(text: str) -> bool:
    return text.lower() not in ("false", "f")
