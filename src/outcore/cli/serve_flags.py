"""The parser of ``outcore serve``: mlx_lm.server's flags that say something here, and its own. Imports no MLX."""

from __future__ import annotations

from pathlib import Path

from .flag_table import FLAGS, MODEL, SETTLED, command_parser, flag, grouped, switch
from .parser import ArgumentParser

_NETWORK = grouped(
    "network",
    flag("--host", "Where to listen. Others than this machine need --api-key-file or --insecure.", "127.0.0.1"),
    flag("--port", "0 takes one that is free.", 8080),
    flag(
        "--api-key-file",
        "A file, for your eyes alone (chmod 600), that holds the key that requests must carry, as Bearer or x-api-key. "
        "Default: the key in OUTCORE_API_KEY, or none.",
        type=Path,
        metavar="FILE",
    ),
    switch("--insecure", "Let whoever reaches this machine ask, without a key."),
    flag("--allowed-hosts", "Further names, with commas, that it may be called by; * for any.", metavar="NAMES"),
    flag(
        "--allowed-origins",
        "Web pages, separated by commas, that may ask and read the answers, such as http://localhost:3000; localhost "
        "for all of this machine's, * for any. Default: none (mlx_lm.server: any).",
        metavar="ORIGINS",
    ),
    flag(
        "--drain",
        "Seconds from Ctrl-C or SIGTERM to the end of the process, at most. Answers under way may go on until 2 "
        "seconds before; of less than 4, for half. A second Ctrl-C ends them at once.",
        30.0,
        metavar="SECONDS",
    ),
)


def serve() -> ArgumentParser:
    """The flags of ``outcore serve``; those of mlx_lm.server that say something here among them."""
    model = FLAGS["model"].but(
        action="append",
        help=f"{MODEL} A folder of models stands for all of them. Again for further ones, which are loaded when they "
        f"are asked for.{SETTLED}",
    )
    context = FLAGS["context"].but(
        group="capacity",
        help="Tokens of prompt and answer to reserve memory for; room for more is made as they come. Default: 2048, or "
        "what fits.",
    )
    say = "where a request does not say"
    names = ("temp", "top-p", "top-k", "min-p", "chat-template-config")
    defaults = [FLAGS[name].but(group=say) for name in names]
    return command_parser(
        "outcore serve",
        "Answer clients of OpenAI's, Anthropic's and Ollama's APIs. Requests share each sweep over the weights; one "
        "alone has drafts, several where these pay. Flags are those of mlx_lm.server where it has them.",
        "outcore serve mlx-community/Qwen3-8B-4bit --memory 4GB",
        flag("models_named", "The same as --model MODEL.", nargs="*", metavar="MODEL"),
        model,
        "revision trust-remote-code adapter-path",
        *_NETWORK,
        FLAGS["max-tokens"].but(group=say, default=512),
        *defaults,
        flag("--chat-template", "A chat template in place of the models' own. Default: theirs.").but(group=say),
        FLAGS["decode-concurrency"].but(group="capacity"),
        flag(
            "--max-context",
            "Tokens at most of a prompt and its answer; longer prompts are refused, answers end there. Default: as "
            "many as the model was made for, where its config.json says so.",
            type=int,
            metavar="N",
        ).but(group="capacity"),
        context,
        FLAGS["prefix-cache"].but(group="capacity", default="on"),
        "prefill-step-size engine-flags draft num-draft-tokens",
        common="model host port api-key-file max-tokens temp top-p decode-concurrency context prefix-cache memory "
        "draft adapter-path json quiet",
    )
