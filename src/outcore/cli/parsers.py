"""The parsers of the core's own commands. Imports no MLX, which takes a second."""

from __future__ import annotations

from .flag_table import FLAGS, MODEL, Flag, command_parser, flag, switch
from .parser import ArgumentParser

SHELLS = ("bash", "zsh", "tcsh")
DEMO_PROMPT, DEMO_BUDGET = "def read_lines(path):\n", "15MB"

CHAT_KEYS = "q quit, r reset the conversation, h this help; Ctrl-C stops an answer, Ctrl-D quits"
CHAT_FILES = "/save FILE and /load FILE keep the conversation"
CHAT_LINES = "/help is h, /bye is q; each line is a message"
CHAT_TYPED = (
    "/help is h, /bye is q; Esc Enter, or \\ at the end, begins another line, and what is pasted is one message"
)

TYPED_ELSEWHERE = "OUTCORE_RANK_TYPED"
"""Set where standard input is lines that somebody types at a launcher elsewhere."""

_COMMON = "model prompt max-tokens system-prompt temp top-p seed memory draft"
_SAMPLING = "temp top-p top-k min-p xtc-probability xtc-threshold"
_CACHE = "kv-bits kv-group-size quantized-kv-start"
_DRAFT = "draft num-draft-tokens"

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
        "model-flags adapter-path",
        FLAGS["prompt"].but(default="hello"),
        tokens_flag(100),
        "system-prompt chat-template-config extra-eos-token prefill-response ignore-chat-template",
        verbose,
        f"{_SAMPLING} min-tokens-to-keep seed max-kv-size kv-eviction prompt-cache-file {_CACHE}",
        f"prefix-cache prefill-step-size quantize-activations engine-flags priority {_DRAFT}",
        common=f"{_COMMON} prefix-cache max-kv-size kv-bits adapter-path json quiet",
    )


def chat() -> ArgumentParser:
    """The flags of ``outcore chat``; those of mlx_lm.chat among them."""
    session = flag(
        "--session",
        "Go on with the conversation of that name, and keep it; nothing of it is computed again, as long as the prefix "
        "cache has room for it.",
        metavar="NAME",
    ).but(group="context")
    context = FLAGS["context"].but(
        help="Tokens of conversation to reserve memory for; room for more is made as they come. Default: 2048, or what "
        "fits; 256 over several machines."
    )
    seed = FLAGS["seed"].but(help="Seed of the random numbers: the same answers, drafted or not.", default=0)
    return command_parser(
        "outcore chat",
        f"Converse with a model. {CHAT_KEYS}. {CHAT_FILES}, {CHAT_TYPED}. What is piped in is a message a line.",
        "outcore chat mlx-community/Qwen3-8B-4bit --memory 4GB",
        "model-flags adapter-path",
        tokens_flag(256),
        f"system-prompt chat-template-config extra-eos-token {_SAMPLING}",
        seed,
        context,
        session,
        "max-kv-size kv-eviction prefill-step-size",
        FLAGS["prefix-cache"].but(default="on"),
        f"engine-flags priority {_DRAFT}",
        common=f"{_COMMON.replace('prompt ', '', 1)} session context prefix-cache max-kv-size adapter-path json quiet",
    )


def batch() -> ArgumentParser:
    """The flags of ``outcore batch``."""
    tokens = tokens_flag(512).but(help="Most tokens of an answer, where a request does not say.")
    return command_parser(
        "outcore batch",
        "Answer a file of requests in OpenAI's batch format. As many as there is memory for share each sweep over the "
        "weights, and new ones join as others finish. A run that was killed goes on with --resume.",
        "outcore batch mlx-community/Qwen3-8B-4bit --memory 4GB --input requests.jsonl --output answers.jsonl",
        "model-flags adapter-path input",
        FLAGS["output"].but(help="Answers, one JSON a line.", required=True),
        tokens,
        "decode-concurrency prefill-step-size force",
        switch("--resume", "Go on with an output that is there already."),
        "engine-flags",
    )


def plan() -> ArgumentParser:
    """The flags of ``outcore plan``."""
    return command_parser(
        "outcore plan",
        "What would be resident at a budget, how fast it would be and what it would take, item by item; and speed "
        "against memory from the smallest budget to everything resident. Loads nothing. The first time, this machine "
        "is measured, which takes up to a minute.",
        "outcore plan mlx-community/Qwen3-8B-4bit --memory 4GB",
        "model-flags",
        *_PLANNED,
        switch("--no-calibrate", "Do not measure; predict from assumptions where nothing is known."),
        "engine-flags priority",
    )


_PLANNED: list[Flag] = [FLAGS["context"].but(group=""), FLAGS["prompt-tokens"].but(group=""), FLAGS["draft"]]


def info() -> ArgumentParser:
    """The flags of ``outcore info``."""
    return command_parser(
        "outcore info",
        "What a model weighs and what would be resident at a budget. Loads nothing: headers are read, and a block of "
        "each tensor to know the model by.",
        "outcore info mlx-community/Qwen3-8B-4bit --memory 4GB",
        "model-flags",
        *_PLANNED,
        "engine-flags",
    )


def list_() -> ArgumentParser:
    """The flags of ``outcore list``."""
    budget = FLAGS["memory"].but(group="", help="The budget to compare with. Default: what would be used.")
    parser = command_parser(
        "outcore list",
        "The models in the Hugging Face Hub's cache: what each takes on the disk, the smallest budget that it runs in, "
        "the one from which all of it is resident, and what it would do here. Loads and fetches nothing.",
        "outcore list --memory 4GB",
        flag("--cache-dir", "Another cache of the Hub. Default: the Hub's own.", metavar="DIR"),
        budget,
        FLAGS["context"].but(group=""),
    )
    parser.runs_model = True
    return parser


def demo() -> ArgumentParser:
    """The flags of ``outcore demo``."""
    return command_parser(
        "outcore demo",
        "Run the demo model under a budget smaller than its weights, and check it against the resident one.",
        "outcore demo --memory 15MB",
        FLAGS["memory"].but(group="", help="The streamed run's budget.", default=DEMO_BUDGET),
        FLAGS["prompt"].but(default=DEMO_PROMPT, help="The prompt. Default: the head of a function."),
        tokens_flag(64).but(help="Tokens to generate."),
        "repeats",
    )


def doctor() -> ArgumentParser:
    """The flags of ``outcore doctor``."""
    model = _OPTIONAL_MODEL.but(help="A model whose files and plan are looked at, too. Default: none.")
    return command_parser(
        "outcore doctor",
        "Check in 20 seconds whether what Outcore relies on holds here: reads give the file's bytes, and come from the "
        "disk; slots are what the device sees; reading and computing overlap; streamed answers are the resident ones.",
        "outcore doctor mlx-community/Qwen3-8B-4bit",
        model,
        "revision",
        needs_model=False,
    )


def pack() -> ArgumentParser:
    """The flags of ``outcore pack``."""
    return command_parser(
        "outcore pack",
        "Copy a model into the aligned layout that reads fastest. A pack that was cut off goes on where it was. "
        "Without --output it goes to the cache and is used whenever that model is loaded.",
        "outcore pack mlx-community/Qwen3-8B-4bit",
        "model-flags",
        FLAGS["output"].but(help="A folder that can then be given as --model. Default: the cache.", metavar="DIR"),
        FLAGS["force"].but(help="Pack again, even where a copy is there."),
        flag(
            "--coding",
            "compact: store layers' bf16 matrices in three quarters of their bytes; decoded in each sweep, to the same "
            "bits. planes:BITS: of quantized layers so many high bits lie apart, so that --draft self:BITS drafts with "
            "them and reads the others alone, with nothing written twice; that draft is made, too. plain: as they are "
            "used. auto: compact on a GPU, plain on a processor, which decodes too slowly.",
            default="auto",
        ),
        FLAGS["draft"].but(
            group="",
            metavar="self:BITS",
            help="Make the low-bit copy too that drafts for the model with --draft self:BITS; else it is made when "
            "first asked for. Default: none.",
        ),
    )


def monitor() -> ArgumentParser:
    """The flags of ``outcore monitor``."""
    return command_parser(
        "outcore monitor",
        "Show what your running Outcore processes do: layers, memory, the disk, tokens; Ctrl-C leaves. With --json a "
        "snapshot a line, four times a second.",
        "outcore monitor --once",
        switch("--once", "Show it once, after a second, and end."),
    )


def calibrate() -> ArgumentParser:
    """The flags of ``outcore calibrate``."""
    model = _OPTIONAL_MODEL.but(help=f"{MODEL} Default: none; the disk of the cache folder alone.")
    return command_parser(
        "outcore calibrate",
        "Measure the disk that a model is on and how long its layers take, in under a minute; kept for this machine, "
        "device, disk and version of MLX.",
        "outcore calibrate mlx-community/Qwen3-8B-4bit",
        model,
        "revision trust-remote-code",
        *(FLAGS[name].but(group="") for name in ("dtype", "cpu-streams")),
        FLAGS["force"].but(help="Measure again what is known already."),
        needs_model=False,
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
        dest="action", required=True, metavar="ls | rm | clear", parser_class=ArgumentParser
    )
    own = {
        "ls": ("Show what there is, largest first.", None),
        "rm": (
            "Remove some of it.",
            flag("names", "As ls shows it, or a beginning that only one has.", nargs="+", metavar="NAME"),
        ),
        "clear": ("Remove all that nobody uses.", FLAGS["force"].but("--yes", "-y", help="Do not ask.")),
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
        "model-flags adapter-path",
        FLAGS["prompt"].but(required=True),
        FLAGS["prompt-cache-file"].but(
            group="", required=True, help="Where to keep it; its name ends in .safetensors."
        ),
        flag(
            "--eos-token",
            "The token that ends an answer, for whoever goes on from the file. Default: the tokenizer's.",
        ),
        f"max-kv-size prefill-step-size {_CACHE} engine-flags",
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


def tokens_flag(most: int) -> Flag:
    return FLAGS["max-tokens"].but(default=most)
