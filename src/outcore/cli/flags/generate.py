"""The flags of ``outcore generate``."""

from __future__ import annotations

from ..arguments import add_draft_arguments, add_engine_arguments, add_model_argument, add_output_arguments
from ..parser import Parser


def setup_arg_parser() -> Parser:
    """The command's flags."""
    parser = Parser(
        prog="outcore generate",
        example="outcore generate mlx-community/Qwen3-8B-4bit --memory 4GB --prompt 'Why is the sky blue?'",
        description="Answer a prompt.",
    )
    add_model_argument(parser, adapter=True)
    parser.add_argument(
        "--prompt", "-p", default="hello", help="The prompt; - reads it from standard input. Default: hello."
    )
    parser.add_argument(
        "--max-tokens", "-m", type=int, default=100, help="Most tokens to generate; -1 for no limit. Default: 100."
    )
    parser.add_argument("--system-prompt", help="System prompt for the chat template. Default: the template's.")
    parser.add_argument("--prefill-response", help="Beginning of the answer, for the chat template. Default: none.")
    parser.add_argument("--ignore-chat-template", action="store_true", help="Take the prompt as it is.")
    parser.add_argument(
        "--chat-template-config", help="Further arguments of the chat template, as JSON. Default: none."
    )
    parser.add_argument(
        "--extra-eos-token", nargs="+", default=(), help="Further tokens that end the answer. Default: none."
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temp", type=float, default=0.0, help="Temperature; 0 takes the likeliest token. Default: 0.0."
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="Draw from the likeliest tokens of so much probability together; 1.0 for all. Default: 1.0.",
    )
    sampling.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="Leave out tokens less likely than this share of the likeliest. Default: 0.0.",
    )
    sampling.add_argument(
        "--top-k", type=int, default=0, help="Draw from so many likeliest tokens; 0 for all. Default: 0."
    )
    sampling.add_argument(
        "--xtc-probability",
        type=float,
        default=0.0,
        help="How often the likeliest of several likely tokens are left out (XTC). Default: 0.0.",
    )
    sampling.add_argument(
        "--xtc-threshold",
        type=float,
        default=0.1,
        help="From which probability on XTC calls a token likely. Default: 0.1.",
    )
    sampling.add_argument(
        "--min-tokens-to-keep", type=int, default=1, help="Tokens that --min-p leaves at least. Default: 1."
    )
    sampling.add_argument(
        "--seed",
        type=int,
        help="Seed of the random numbers: the same text, drafted or not. Default: another each time.",
    )
    cache = parser.add_argument_group("context")
    cache.add_argument("--max-kv-size", type=int, help="Most tokens that the key-value cache keeps. Default: all.")
    cache.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    cache.add_argument("--prompt-cache-file", help="A prompt cache saved by mlx_lm.cache_prompt. Default: none.")
    cache.add_argument("--kv-bits", type=int, help="Quantize the key-value cache to so many bits. Default: not at all.")
    cache.add_argument("--kv-group-size", type=int, default=64, help="Numbers that share a scale there. Default: 64.")
    cache.add_argument(
        "--quantized-kv-start", type=int, default=5000, help="Token from which it is quantized. Default: 5000."
    )
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
