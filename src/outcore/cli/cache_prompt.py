"""``outcore cache-prompt``: compute a prompt once and keep it. Flags and file are those of ``mlx_lm.cache_prompt``."""

from __future__ import annotations

import argparse
import time
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.find_model import resolve_model
from ..checkpoint.prompt_cache import PromptCacheFile
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.generate import stream_generate
from ..decode.loader import load_model
from ..errors import UsageError
from ..sizes import format_size
from ..text import counted, one_line
from .answering import cache_options, check_cache_flags, note_unquantized
from .arguments import loading_options, text_of
from .engine import engine_record, print_summary, progress_bar, sweep_progress, watched
from .generate import standard_input


def run(args: argparse.Namespace) -> None:
    """Run the command.

    Raises:
        UsageError: a flag that cannot be meant, an empty prompt, or a file that cannot be written.
    """
    check_cache_flags(args)
    if args.kv_disk == "on":
        raise UsageError("--kv-disk on: what is written to the file has to be in memory; leave it out")
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
            **loading_options(args) | {"kv_disk": "off"},
            draft="none",
            context=len(prompt) + 1,
            prompt=len(prompt),
            resumable=True,
            progress=bar,
        )
        with watched(model, args) as session:
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
                **cache_options(args),
            ):
                first_token()
            seconds = time.perf_counter() - began
            note_unquantized(args, session, len(prompt) + 1)
            assert session.in_cache == len(prompt)
            nbytes = file.save(cache, args.model, settings)
            record = {"file": str(file.path), "prompt_tokens": len(prompt), "bytes": nbytes, "seconds": seconds}
            args.result.record = record | engine_record(session)
            print(f"{file.path}: {counted(len(prompt), 'token')}, {format_size(nbytes)}, {seconds:.1f} s")
            print_summary([], session)


def encode_prompt(tokenizer: TokenizerWrapper, given: str) -> list[int]:
    """The prompt's token ids, open at its end if a chat template wrote them; as mlx-lm does.

    Raises:
        UsageError: what was given is no text, or nothing that the template takes.
    """
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
