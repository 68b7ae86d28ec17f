"""``outcore cache-prompt``: computes a prompt and saves its KV cache, as ``mlx_lm.cache_prompt`` does."""

from __future__ import annotations

import argparse
import time
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..checkpoint.find_model import resolve_model
from ..checkpoint.prompt_cache import PromptCacheFile
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.generate import stream_generate
from ..decode.loader import load_model
from ..errors import UsageError
from ..sizes import format_size
from ..text import counted
from .answering import note_unquantized, prompt_text, rendered
from .arguments import cache_options, check_numbers, loading_options
from .engine import ProgressBar, engine_record, prefill_progress, print_summary, watched


def run(args: argparse.Namespace) -> None:
    check_numbers(args)
    if args.kv_disk == "on":
        raise UsageError("--kv-disk on: cache-prompt needs the whole KV cache in memory; leave the flag out")
    folder = resolve_model(args.model, args.revision)
    settings: dict[str, Any] = {"trust_remote_code": args.trust_remote_code}
    if args.eos_token is not None:
        settings["eos_token"] = args.eos_token
    tokenizer = load_tokenizer(folder, settings)
    text = prompt_text(args.prompt)
    if tokenizer.has_chat_template:
        # The message is left unfinished, as in mlx-lm.
        text = rendered(tokenizer, [{"role": "user", "content": text}], continue_final_message=True)
    prompt = list(tokenizer.encode(text, **({"add_special_tokens": False} if tokenizer.has_chat_template else {})))
    if not prompt:
        raise UsageError("--prompt: empty; give at least one token")
    sizes: dict[str, Any] = {"context": len(prompt) + 1, "prompt": len(prompt), "kv_disk": "off"}
    with PromptCacheFile(args.prompt_cache_file) as file, ProgressBar() as bar:
        options = loading_options(args) | sizes
        model, _ = load_model(folder, **options, draft="none", resumable=True, progress=bar)
        with watched(model, args) as session:
            cache = make_prompt_cache(model, args.max_kv_size)
            first_token, began = prefill_progress(bar, session), time.perf_counter()
            # One token is sampled, which costs no forward pass, and left out of the caches.
            given = {"prompt_cache": cache, "max_tokens": 1, "leave_last": True, **cache_options(args)}
            for _ in stream_generate(model, tokenizer, prompt, **given):
                first_token()
            seconds = time.perf_counter() - began
            note_unquantized(args, session, len(prompt) + 1)
            assert session.in_cache == len(prompt)
            nbytes = file.save(cache, args.model, settings)
            record = {"file": str(file.path), "prompt_tokens": len(prompt), "bytes": nbytes, "seconds": seconds}
            args.result.record = record | engine_record(session)
            print(f"{file.path}: {counted(len(prompt), 'token')}, {format_size(nbytes)}, {seconds:.1f} s")
            print_summary([], session)
