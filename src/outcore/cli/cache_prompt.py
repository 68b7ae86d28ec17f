"""``outcore cache-prompt``: compute a prompt once and keep it. Flags and file are those of ``mlx_lm.cache_prompt``."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from .importing import importing_mlx
from .parser import Parser

if TYPE_CHECKING:
    from mlx_lm.tokenizer_utils import TokenizerWrapper


def setup_arg_parser() -> argparse.ArgumentParser:
    """The command's flags."""
    from .engine import add_engine_arguments, add_model_argument

    parser = Parser(
        prog="outcore cache-prompt",
        description="Compute a prompt once, and keep what the model makes of it in a file that outcore generate and "
        "mlx_lm.generate go on from with --prompt-cache-file.",
    )
    add_model_argument(parser)
    parser.add_argument("--adapter-path", help="Folder of trained adapter weights and their config.")
    parser.add_argument("--prompt", "-p", required=True, help="The prompt; - reads it from standard input.")
    parser.add_argument(
        "--prompt-cache-file", required=True, metavar="FILE", help="Where to keep it; its name ends in .safetensors."
    )
    parser.add_argument("--eos-token", help="The token that ends an answer, for whoever goes on from the file.")
    parser.add_argument("--max-kv-size", type=int, help="Most tokens that the key-value cache keeps.")
    parser.add_argument("--prefill-step-size", type=int, help="Prompt tokens at a time. Default: 2048, or what fits.")
    parser.add_argument("--kv-bits", type=int, help="Quantize the key-value cache to so many bits.")
    parser.add_argument("--kv-group-size", type=int, default=64, help="Numbers that share a scale there. Default: 64.")
    parser.add_argument(
        "--quantized-kv-start", type=int, default=5000, help="Token from which it is quantized. Default: 5000."
    )
    add_engine_arguments(parser)
    parser.add_argument("--json", action="store_true", help="Print JSON and nothing else.")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command.

    Raises:
        UsageError: a flag that cannot be meant, an empty prompt, or a file that cannot be written.
    """
    args = setup_arg_parser().parse_args(argv)
    with importing_mlx():
        from mlx_lm.models.cache import make_prompt_cache

        from ..generation.generate import stream_generate
        from ..loading.loader import load_model
        from ..model.checkpoint import resolve_model
        from ..model.prompt_cache import PromptCacheFile
        from ..model.tokenizer import load_tokenizer
        from ..options import whole
        from ..sizes import format_size
        from .engine import engine_options, engine_record, print_summary, progress_bar, sweep_progress
        from .generate import check_cache_flags

    check_cache_flags(args)
    if args.prefill_step_size is not None:
        whole("--prefill-step-size", args.prefill_step_size)
    folder = resolve_model(args.model, args.revision)
    settings: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.eos_token is not None:
        settings["eos_token"] = args.eos_token
    tokenizer = load_tokenizer(folder, settings)
    prompt = encode_prompt(tokenizer, args.prompt)
    if not prompt:
        raise UsageError("--prompt: it is empty; give at least one token")
    with PromptCacheFile(args.prompt_cache_file) as file, progress_bar() as bar:
        model, _ = load_model(
            folder,
            **engine_options(args),
            draft="none",
            context=len(prompt) + 1,
            prompt=len(prompt),
            resumable=True,
            prefill_step_size=args.prefill_step_size,
            trust_remote_code=args.trust_remote_code,
            adapter_path=args.adapter_path,
            progress=bar,
        )
        with model.outcore as session:
            cache = make_prompt_cache(model, args.max_kv_size)
            first_token = sweep_progress(bar, session)
            began = time.perf_counter()
            # The token after the prompt is chosen, which is no work, and stays out of the caches.
            for _ in stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens=1,
                leave_last=True,
                prompt_cache=cache,
                max_kv_size=args.max_kv_size,
                kv_bits=args.kv_bits,
                kv_group_size=args.kv_group_size,
                quantized_kv_start=args.quantized_kv_start,
                **({"prefill_step_size": args.prefill_step_size} if args.prefill_step_size else {}),
            ):
                first_token()
            seconds = time.perf_counter() - began
            assert session.in_cache == len(prompt)
            nbytes = file.save(cache, args.model, settings)
            if args.json:
                record = {"file": str(file.path), "prompt_tokens": len(prompt), "bytes": nbytes, "seconds": seconds}
                print(json.dumps(record | engine_record(session)))
            else:
                print(f"{file.path}: {len(prompt)} tokens, {format_size(nbytes)}, {seconds:.1f} s")
                print_summary([], session)


def encode_prompt(tokenizer: TokenizerWrapper, given: str) -> list[int]:
    """The prompt's token ids, open at its end if a chat template wrote them; as mlx-lm does.

    Raises:
        UsageError: what was given is no text, or nothing that the template takes.
    """
    from ..text import one_line
    from .engine import text_of
    from .generate import standard_input

    text = text_of("--prompt", standard_input() if given == "-" else given)
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    try:
        tokens = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=False, continue_final_message=True
        )
    except Exception as e:  # a template is code that comes with the model: it raises what it likes
        raise UsageError(f"the model's chat template refuses this: {one_line(e)}") from e
    return [int(t) for t in tokens]
