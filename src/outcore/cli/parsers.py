"""The parsers of the core's own commands. Imports no MLX, which takes a second."""

from __future__ import annotations

from pathlib import Path

from .flag_table import FLAGS, MODEL, Flag, command_parser, flag, switch
from .parser import ArgumentParser

SHELLS = ("bash", "zsh", "tcsh")
DEMO_PROMPT, DEMO_BUDGET = "def read_lines(path):\n", "15MB"

CHAT_KEYS = "q quit, r reset the conversation, h this help; Ctrl-C stops an answer, Ctrl-D quits"
CHAT_FILES = "/save FILE and /load FILE keep the conversation"
CHAT_LINES = "/help is h, /bye is q; each line is a message"
CHAT_TYPED = "/help is h, /bye is q; Esc Enter, or \\ at the end, begins another line, and what is pasted is one message"

_COMMON = "model prompt max-tokens system-prompt temp top-p seed memory draft"
_MODEL = ["a model", "adapter-path"]
_SAMPLING = ["temp", "top-p", "top-k", "min-p", "xtc-probability", "xtc-threshold"]
_CACHE = ["kv-bits", "kv-group-size", "quantized-kv-start"]
_DRAFT = ["draft", "num-draft-tokens"]

_OPTIONAL_MODEL = FLAGS["model"].but(help=f"{MODEL} Default: none.")


def generate() -> ArgumentParser:
    """The flags of ``outcore generate``; those of mlx_lm.generate among them."""
    verbose = flag(
        "--verbose",
        "False or F: print the answer alone, without a summary.",
        type=lambda text: text.lower() not in ("false", "f"),
        default=True,
    )
    return command_parser(
        "outcore generate",
        "Answer a prompt.",
        "outcore generate mlx-community/Qwen3-8B-4bit --memory 4GB --prompt 'Why is the sky blue?'",
        [*_MODEL, "modelfile", FLAGS["prompt"].but(default="hello"), _tokens(100), "system-prompt"]
        + ["chat-template-config", "extra-eos-token", "prefill-response", "ignore-chat-template", verbose]
        + [*_SAMPLING, "min-tokens-to-keep", "seed", "max-kv-size", "kv-eviction", "prompt-cache-file", *_CACHE]
        + ["prefix-cache", "prefill-step-size", "quantize-activations", "engine", *_DRAFT],
        common=f"{_COMMON} prefix-cache max-kv-size kv-bits adapter-path json quiet",
    )


def chat() -> ArgumentParser:
    """The flags of ``outcore chat``; those of mlx_lm.chat among them."""
    session = flag(
        "--session",
        "Go on with the conversation of that name, and keep it; nothing of it is computed again, as long as the prefix "
        "cache has room for it.",
        "context",
        metavar="NAME",
    )
    context = FLAGS["context"].but(
        help="Tokens of conversation to reserve memory for; room for more is made as they come. Default: 2048, or what "
        "fits; 256 over several machines."
    )
    seed = FLAGS["seed"].but(help="Seed of the random numbers: the same answers, drafted or not.", default=0)
    return command_parser(
        "outcore chat",
        f"Converse with a model. {CHAT_KEYS}. {CHAT_FILES}, {CHAT_TYPED}. What is piped in is a message a line.",
        "outcore chat mlx-community/Qwen3-8B-4bit --memory 4GB",
        [*_MODEL, "modelfile", _tokens(256), "system-prompt", "chat-template-config", "extra-eos-token", *_SAMPLING]
        + [seed, context, session, "max-kv-size", "kv-eviction", "prefill-step-size"]
        + [FLAGS["prefix-cache"].but(default="on"), "engine", *_DRAFT],
        common=f"{_COMMON.replace('prompt ', '', 1)} session context prefix-cache max-kv-size adapter-path json quiet",
    )


def serve() -> ArgumentParser:
    """The flags of ``outcore serve``; those of mlx_lm.server that say something here among them."""
    model = FLAGS["model"].but(
        action="append",
        help=f"{MODEL} Again for further ones, which are loaded when they are asked for. Default: OUTCORE_MODEL, or "
        "the configuration file's.",
    )
    context = FLAGS["context"].but(
        group="capacity",
        help="Tokens of prompt and answer to reserve memory for; room for more is made as they come. Default: 2048, or "
        "what fits.",
    )
    say = "where a request does not say"
    defaults: list[str | Flag] = [FLAGS[name].but(group=say) for name in ("temp", "top-p", "top-k", "min-p")]
    return command_parser(
        "outcore serve",
        "Answer clients of OpenAI's, Anthropic's and Ollama's APIs. Requests share each sweep over the weights; one "
        "alone has drafts, several where these pay. Flags are those of mlx_lm.server where it has them.",
        "outcore serve mlx-community/Qwen3-8B-4bit --memory 4GB",
        [flag("models_named", "The same as --model MODEL.", nargs="*", metavar="MODEL"), model, *_SERVED, "revision"]
        + ["trust-remote-code", "adapter-path", "modelfile", *_NETWORK, _tokens(512).but(group=say), *defaults]
        + [FLAGS["chat-template-config"].but(group=say)]
        + [flag("--chat-template", "A chat template in place of the models' own. Default: theirs.", say)]
        + [FLAGS["decode-concurrency"].but(group="capacity"), *_CAPACITY, context]
        + [FLAGS["prefix-cache"].but(group="capacity", default="on"), "prefill-step-size", "engine", *_DRAFT],
        common="model host port api-key-file max-tokens temp top-p decode-concurrency context prefix-cache memory "
        "draft adapter-path json quiet",
    )


_SERVED = [
    flag(
        "--models-folder",
        "Serve every model in this folder, by the name of its own folder.",
        type=Path,
        metavar="DIR",
    ),
    flag(
        "--keep-alive",
        "How long a model that nobody asks stays in memory, where there are several; negative: for good.",
        type=float,
        metavar="SECONDS",
        default=300.0,
    ),
]

_NETWORK = [
    flag(
        "--host",
        "Where to listen. Others than this machine need --api-key-file or --insecure.",
        "network",
        default="127.0.0.1",
    ),
    flag("--port", "0 takes one that is free.", "network", type=int, default=8080),
    flag(
        "--api-key-file",
        "A file, for your eyes alone (chmod 600), that holds the key that requests must carry, as Bearer or x-api-key. "
        "Default: the key in OUTCORE_API_KEY, or none.",
        "network",
        type=Path,
        metavar="FILE",
    ),
    switch("--insecure", "Let whoever reaches this machine ask, without a key.", "network"),
    flag(
        "--allowed-hosts",
        "Names, separated by commas, that the server may be called by besides this machine's own; * for any.",
        "network",
        metavar="NAMES",
        default="",
    ),
    flag(
        "--allowed-origins",
        "Web pages, separated by commas, that may ask and read the answers, such as http://localhost:3000; localhost "
        "for all of this machine's, * for any. Default: none (mlx_lm.server: any).",
        "network",
        metavar="ORIGINS",
        default="",
    ),
    flag(
        "--drain",
        "Seconds from Ctrl-C or SIGTERM to the end of the process, at most. Answers under way may go on until 2 seconds "
        "before; of less than 4, for half. A second Ctrl-C ends them at once.",
        "network",
        type=float,
        default=30.0,
        metavar="SECONDS",
    ),
]

_CAPACITY = [
    flag(
        "--max-waiting",
        "Requests at most that wait for their turn; others are told to come again (429).",
        "capacity",
        type=int,
        default=128,
        metavar="N",
    ),
    flag(
        "--max-context",
        "Tokens at most of a prompt and its answer; longer prompts are refused, answers end there. Default: as many as "
        "the model was made for, where its config.json says so.",
        "capacity",
        type=int,
        metavar="N",
    ),
]


def batch() -> ArgumentParser:
    """The flags of ``outcore batch``."""
    tokens = _tokens(512).but(help="Most tokens of an answer, where a request does not say.")
    parser = command_parser(
        "outcore batch",
        "Answer a file of requests in OpenAI's batch format. As many as there is memory for share each sweep over the "
        "weights, and new ones join as others finish. A run that was killed goes on with --resume.",
        "outcore batch mlx-community/Qwen3-8B-4bit --memory 4GB --input requests.jsonl --output answers.jsonl",
        [*_MODEL, "input", FLAGS["output"].but(help="Answers, one JSON a line.", required=True), tokens]
        + ["decode-concurrency", "prefill-step-size", "overwrite", "engine"]
        + [switch("--resume", "Go on with an output that is there already.")],
    )
    return parser


def plan() -> ArgumentParser:
    """The flags of ``outcore plan``."""
    return command_parser(
        "outcore plan",
        "What would be resident at a budget, how fast it would be and what it would take, item by item; and speed "
        "against memory from the smallest budget to everything resident. Loads nothing. The first time, this machine "
        "is measured, which takes up to a minute.",
        "outcore plan mlx-community/Qwen3-8B-4bit --memory 4GB --plot speed.png",
        ["a model", *_PLANNED]
        + [switch("--no-calibrate", "Do not measure; predict from assumptions where nothing is known.")]
        + [
            flag(
                "--device",
                "Predict for a published device instead of this machine; without a model, how well the published "
                "system's own speeds are explained there.",
                metavar="NAME",
            ),
            flag("--plot", "Write speed against memory as PNG or SVG.", type=Path, metavar="FILE"),
            "engine",
        ],
    )


_PLANNED: list[str | Flag] = [FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), "draft"]


def info() -> ArgumentParser:
    """The flags of ``outcore info``."""
    return command_parser(
        "outcore info",
        "What a model weighs and what would be resident at a budget. Loads nothing: headers are read, and a block of "
        "each tensor to know the model by.",
        "outcore info mlx-community/Qwen3-8B-4bit --memory 4GB",
        ["a model", *_PLANNED, "engine"],
    )


def list_() -> ArgumentParser:
    """The flags of ``outcore list``."""
    budget = FLAGS["memory"].but(group="", help="The budget to compare with. Default: what would be used.")
    parser = command_parser(
        "outcore list",
        "The models in the Hugging Face Hub's cache: what each takes on the disk, the smallest budget that it runs in, "
        "the one from which all of it is resident, and what it would do here. Loads and fetches nothing.",
        "outcore list --memory 4GB",
        [flag("--cache-dir", "Another cache of the Hub. Default: the Hub's own.", metavar="DIR"), budget]
        + [FLAGS["context"].but(group="")],
    )
    parser.runs_model = True
    return parser


def demo() -> ArgumentParser:
    """The flags of ``outcore demo``."""
    return command_parser(
        "outcore demo",
        "Run the demo model under a budget smaller than its weights, and check it against the resident one.",
        "outcore demo --memory 15MB",
        [FLAGS["memory"].but(group="", help="The streamed run's budget.", default=DEMO_BUDGET)]
        + [FLAGS["prompt"].but(default=DEMO_PROMPT, help="The prompt. Default: the head of a function.")]
        + [_tokens(64).but(help="Tokens to generate."), "repeats"],
    )


def doctor() -> ArgumentParser:
    """The flags of ``outcore doctor``."""
    model = _OPTIONAL_MODEL.but(help="A model whose files and plan are looked at, too. Default: none.")
    return command_parser(
        "outcore doctor",
        "Check in 20 seconds whether what Outcore relies on holds here: reads give the file's bytes, and come from the "
        "disk; slots are what the device sees; reading and computing overlap; streamed answers are the resident ones.",
        "outcore doctor mlx-community/Qwen3-8B-4bit",
        [model, "revision"],
        needs_model=False,
    )


def pack() -> ArgumentParser:
    """The flags of ``outcore pack``."""
    return command_parser(
        "outcore pack",
        "Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where it was. Without "
        "--output it goes to the cache and is used whenever that model is loaded.",
        "outcore pack mlx-community/Qwen3-8B-4bit",
        [
            "a model",
            FLAGS["output"].but(help="A folder that can then be given as --model. Default: the cache.", metavar="DIR"),
            FLAGS["force"].but(help="Pack again, even where a copy is there."),
            flag(
                "--coding",
                "compact: store layers' bf16 matrices in three quarters of their bytes, and 4-bit weights' scales in a "
                "quarter of theirs; decoded in each sweep, to the same bits. planes:BITS: of quantized layers so many "
                "high bits lie apart, so that --draft self:BITS drafts with them and reads the others alone, with "
                "nothing written twice; that draft is made, too. plain: as they are used. auto: compact on a GPU, "
                "plain on a processor, which decodes too slowly.",
                default="auto",
            ),
            FLAGS["draft"].but(
                group="",
                metavar="self:BITS",
                help="Make the low-bit copy too that drafts for the model with --draft self:BITS; else it is made when "
                "first asked for. Default: none.",
            ),
        ],
    )


def cache() -> ArgumentParser:
    """The flags of ``outcore cache``, and of its actions."""
    parser = ArgumentParser(
        prog="outcore cache",
        example="outcore cache ls",
        description="What Outcore made once and keeps: packed copies, self drafts, calibrations, compiled kernels, "
        "marks that this machine was looked at, and what was computed of prompts. All of it is made again when it is "
        "needed; what is in use stays.",
    )
    actions = parser.add_subparsers(
        dest="action", required=True, metavar="ls | verify | rm | clear", parser_class=ArgumentParser
    )
    own = {
        "ls": ("Show what there is, largest first.", None),
        "verify": (
            "Read what is kept of prompts, and remove what is damaged, which would be found when it is used, and "
            "computed again. The status is 1 if there was any.",
            None,
        ),
        "rm": (
            "Remove some of it.",
            flag("names", "As ls shows it, or a beginning that only one has.", nargs="+", metavar="NAME"),
        ),
        "clear": ("Remove all that nobody uses.", switch("--yes -y", "Do not ask.")),
    }
    for name, (text, flag_) in own.items():
        action = actions.add_parser(name, help=text, description=text)
        for each in [flag_] if flag_ is not None else []:
            each.add(action)
        group = action.add_argument_group("output")
        for output in ("json", "quiet", "log-level"):
            FLAGS[output].add(group)
    return parser


def cache_prompt() -> ArgumentParser:
    """The flags of ``outcore cache-prompt``; those of mlx_lm.cache_prompt among them."""
    return command_parser(
        "outcore cache-prompt",
        "Compute a prompt once, and keep what the model makes of it in a file that outcore generate and "
        "mlx_lm.generate go on from with --prompt-cache-file.",
        'outcore cache-prompt mlx-community/Qwen3-8B-4bit -p "A text" --prompt-cache-file text.safetensors',
        [*_MODEL, FLAGS["prompt"].but(required=True)]
        + [
            FLAGS["prompt-cache-file"].but(
                group="", required=True, help="Where to keep it; its name ends in .safetensors."
            ),
            flag(
                "--eos-token",
                "The token that ends an answer, for whoever goes on from the file. Default: the tokenizer's.",
            ),
        ]
        + ["max-kv-size", "prefill-step-size", *_CACHE, "engine"],
    )


def completion() -> ArgumentParser:
    """The flags of ``outcore completion``."""
    parser = ArgumentParser(
        prog="outcore completion",
        example="outcore completion bash > ~/.local/share/bash-completion/completions/outcore",
        description="Print what lets a shell complete Outcore's commands and flags. For zsh, save it as _outcore in a "
        "folder of $fpath.",
    )
    parser.add_argument("shell", metavar="SHELL", help=f"{', '.join(SHELLS)}.")
    return parser


def _tokens(most: int) -> Flag:
    return FLAGS["max-tokens"].but(default=most)
