"""The flags of ``outcore serve``."""

from __future__ import annotations

from pathlib import Path

from ..arguments import (
    add_draft_arguments,
    add_engine_arguments,
    add_output_arguments,
    add_prefix_cache_argument,
)
from ..parser import ArgumentParser

NOT_HERE = {
    "pipeline": "outcore launch shares a model out over machines",
    "use_default_chat_template": "transformers has no default templates any more; --chat-template gives one",
    "kv_bits": "requests share sweeps, and quantized caches cannot be put together (nor in mlx_lm.server); "
    "outcore generate has it",
    "kv_group_size": "it goes with --kv-bits, which outcore generate has",
    "quantized_kv_start": "it goes with --kv-bits, which outcore generate has",
}
"""Flags of ``mlx_lm.server`` that are refused, and why."""

NOTHING_HERE = {
    "prompt_concurrency": "prompts join when they come",
    "prompt_cache_size": "prompts are kept on disk, by bytes; --prefix-cache says how many",
    "prompt_cache_bytes": "prompts are kept on disk; --prefix-cache SIZE says how many bytes",
}
"""Those that are taken and say nothing, and why."""


def setup_arg_parser() -> ArgumentParser:
    """The command's flags."""
    parser = ArgumentParser(
        prog="outcore serve",
        example="outcore serve mlx-community/Qwen3-8B-4bit --memory 4GB",
        description="Answer clients of OpenAI's, Anthropic's and Ollama's APIs. Requests share each sweep over the "
        "weights; one alone has drafts, several where these pay. Flags are those of mlx_lm.server where it has them.",
    )
    _add_models(parser)
    _add_network(parser)
    _add_defaults(parser)
    _add_capacity(parser)
    add_engine_arguments(parser)
    # Memory for texts is taken as they come: little of it at first.
    parser.set_defaults(priority="speed")
    add_draft_arguments(parser)
    others = parser.add_argument_group("flags of mlx_lm.server that say nothing here")
    for name, why in NOTHING_HERE.items():
        others.add_argument(_flag(name), metavar="N", help=f"Taken, and says nothing: {why}. Default: none.")
    for name, why in NOT_HERE.items():
        switch = {"action": "store_true"} if name in ("pipeline", "use_default_chat_template") else {"metavar": "N"}
        others.add_argument(_flag(name), help=f"Refused: {why}. Default: none.", **switch)  # type: ignore[arg-type]
    add_output_arguments(parser)
    return parser


def _add_models(parser: ArgumentParser) -> None:
    parser.add_argument("models_named", nargs="*", metavar="MODEL", help="The same as --model MODEL.")
    parser.add_argument(
        "--model",
        action="append",
        metavar="MODEL",
        help="A local folder, or a model of the Hugging Face Hub; again for further ones, which are loaded when they "
        "are asked for. Default: OUTCORE_MODEL, or the configuration file's.",
    )
    parser.add_argument(
        "--models-folder",
        type=Path,
        metavar="DIR",
        help="Serve every model in this folder, by the name of its own folder. Default: none.",
    )
    parser.add_argument("--revision", help="A branch, tag or commit on the Hub. Default: its newest.")
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="Run code that comes with a model or its tokenizer."
    )
    parser.add_argument("--adapter-path", help="Folder of trained adapter weights and their config. Default: none.")
    parser.add_argument(
        "--keep-alive",
        type=float,
        metavar="SECONDS",
        default=300.0,
        help="How long a model that nobody asks stays in memory, where there are several; negative: for good. "
        "Default: 300.",
    )


def _add_network(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("network")
    group.add_argument(
        "--host",
        default="127.0.0.1",
        help="Where to listen. Others than this machine need --api-key-file or --insecure. Default: %(default)s.",
    )
    group.add_argument("--port", type=int, default=8080, help="0 takes one that is free. Default: %(default)s.")
    group.add_argument(
        "--api-key",
        metavar="KEY",
        help="A key that requests must carry, as Bearer or x-api-key. On a command line every user of this machine "
        "sees it (ps): better give --api-key-file or OUTCORE_API_KEY. Default: OUTCORE_API_KEY, or none.",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="A file that holds the key, for your eyes alone (chmod 600). Default: none.",
    )
    group.add_argument("--insecure", action="store_true", help="Let whoever reaches this machine ask, without a key.")
    group.add_argument(
        "--allowed-hosts",
        metavar="NAMES",
        default="",
        help="Names, separated by commas, that the server may be called by besides this machine's own; * for any. "
        "Default: none.",
    )
    group.add_argument(
        "--allowed-origins",
        metavar="ORIGINS",
        default="",
        help="Web pages, separated by commas, that may ask and read the answers, such as http://localhost:3000; "
        "localhost for all of this machine's, * for any. Default: none (mlx_lm.server: any).",
    )
    group.add_argument(
        "--max-connections", type=int, default=512, metavar="N", help="Connections at once. Default: %(default)s."
    )
    group.add_argument(
        "--max-body", metavar="SIZE", default="4MB", help="Size of a request at most. Default: %(default)s."
    )
    group.add_argument(
        "--drain",
        type=float,
        default=30.0,
        metavar="SECONDS",
        help="Seconds from Ctrl-C or SIGTERM to the end of the process, at most. Answers under way may go on until 2 "
        "seconds before; of less than 4, for half. A second Ctrl-C ends them at once. Default: 30.",
    )


def _add_defaults(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("where a request does not say")
    group.add_argument("--max-tokens", type=int, default=512, help="Most tokens of an answer. Default: %(default)s.")
    group.add_argument(
        "--temp", type=float, default=0.0, help="Temperature; 0 takes the likeliest token. Default: 0.0."
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="Draw from the likeliest tokens of so much probability together; 1.0 for all. Default: 1.0.",
    )
    group.add_argument(
        "--top-k", type=int, default=0, help="Draw from so many likeliest tokens; 0 for all. Default: 0."
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="Leave out tokens less likely than this share of the likeliest. Default: 0.0.",
    )
    group.add_argument(
        "--chat-template-args", metavar="JSON", help="Further arguments of the chat template. Default: none."
    )
    group.add_argument(
        "--chat-template", metavar="TEXT", help="A chat template in place of the models' own. Default: theirs."
    )


def _add_capacity(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("capacity")
    group.add_argument(
        "--decode-concurrency",
        type=int,
        default=32,
        metavar="N",
        help="Answers at most that share a sweep. Default: %(default)s.",
    )
    group.add_argument(
        "--max-waiting",
        type=int,
        default=128,
        metavar="N",
        help="Requests at most that wait for their turn; others are told to come again (429). Default: %(default)s.",
    )
    group.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="Tokens of prompt and answer to reserve memory for; room for more is made as they come. Default: 2048, "
        "or what fits.",
    )
    group.add_argument(
        "--max-context",
        type=int,
        metavar="N",
        help="Tokens at most of a prompt and its answer; longer prompts are refused, answers end there. Default: as "
        "many as the model was made for, where its config.json says so.",
    )
    add_prefix_cache_argument(group, on=True)
    group.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
