"""``outcore generate`` and ``outcore cache-prompt``, with the flags of mlx-lm's programs."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.find_model import resolve_model
from ..checkpoint.positions import config_of, longest_context
from ..checkpoint.prompt_cache import PromptCacheFile, open_prompt_cache
from ..checkpoint.tokenizer import load_tokenizer
from ..checks import whole
from ..decode.generate import stream_generate
from ..decode.loader import load_model
from ..decode.prompt import cached_tokens
from ..errors import UsageError
from ..machine.settings import setting
from ..modules.cache_check import check_cache
from ..serve.prompting import check_characters
from ..sizes import format_size
from ..text import counted
from .engine import (
    AnswerOutput,
    ProgressBar,
    draft_tokens,
    engine_record,
    generation_options,
    note_unquantized,
    open_images,
    open_tokenizer,
    prefill_progress,
    print_summary,
    rendered,
    watched,
)
from .flags import cache_options, loading_options, template_options, text_of
from .piped import prompt_text

HINT = "; try without --system-prompt and --chat-template-config, or with --ignore-chat-template"


def run(args: argparse.Namespace) -> None:
    draft_tokens(args)
    if args.seed is not None:
        mx.random.seed(whole("--seed", args.seed, 0, 2**64 - 1))
    cache, settings = prompt_cache(args)
    folder, tokenizer = open_tokenizer(args, settings, template=not args.ignore_chat_template, cached=cache is not None)
    check_characters(len(args.prompt), longest_context(config_of(folder)))
    images = open_images(args, folder, args.image) if getattr(args, "image", None) else None
    prompt = encode_prompt(tokenizer, args, in_cache=cache is not None, images=images)
    if not prompt:
        raise UsageError("--prompt: empty; give at least one token")
    held = _cached_tokens(cache)
    args.max_tokens = args.preset.answer_tokens(len(prompt) + held, args.max_tokens)
    with ProgressBar() as bar:
        model, _ = load_model(
            folder,
            **loading_options(args),
            context=None if args.max_tokens < 0 else len(prompt) + args.max_tokens + held,
            prompt=len(prompt),
            resumable=cache is not None,
            model_config={"quantize_activations": True} if args.quantize_activations else None,
            progress=bar,
        )
        with watched(model, args) as session:
            check_cache(session.forms, cache, f"--prompt-cache-file {args.prompt_cache_file}")
            options = generation_options(args, tokenizer) | {"prompt_cache": cache, "images": images and images.read}
            begun, answer = prefill_progress(bar, session), AnswerOutput()
            try:
                for _ in answer.shown(stream_generate(model, tokenizer, prompt, **options), args.preset.stop, begun):
                    pass
            except KeyboardInterrupt:
                answer.finish = "interrupted"
                raise
            finally:
                if answer.tokens:
                    print(flush=True)
                    note_unquantized(args, session, held + len(prompt) + len(answer.tokens))
                    r = answer.record()
                    tokens, first = counted(r["prompt_tokens"], "token"), f"{r['ttft_s']:.2f} s to the first token"
                    made = f"{counted(len(r['tokens']), 'token')}, {r['generation_tps']:.3f} tokens per second"
                    if args.verbose:
                        print_summary([f"Prompt: {tokens}, {first}", f"Generation: {made}"], session)
                    args.result.record = r | engine_record(session)


def prompt_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, Any]]:
    """Opens ``--prompt-cache-file`` and returns its caches and tokenizer settings. Sets ``args.model`` if not given."""
    if args.prompt_cache_file is None:
        return None, {}
    cache, settings, model = open_prompt_cache(Path(args.prompt_cache_file), args.model)
    if args.model is None:
        settled = setting("model") if model is None else None
        args.model = model if settled is None else settled.value
    if not args.model:
        raise UsageError(f"--prompt-cache-file {args.prompt_cache_file}: names no model; give --model NAME")
    return cache, settings


def _cached_tokens(cache: list[Any] | None) -> int:
    try:
        return cached_tokens(cache) if cache else 0
    except (AttributeError, TypeError, ValueError, IndexError):
        return 0  # check_cache will refuse it


def encode_prompt(tokenizer: TokenizerWrapper, args: argparse.Namespace, in_cache: bool, images: Any) -> list[int]:
    extra = template_options(args.chat_template_config)
    encode, text = (tokenizer.encode, args.prompt) if images is None else (images.encode, images.mark + args.prompt)
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return list(encode(text, add_special_tokens=True))
    messages = [*map(dict, args.preset.messages), {"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": text_of("--system-prompt", args.system_prompt)})
    if args.prefill_response is not None:
        messages.append({"role": "assistant", "content": text_of("--prefill-response", args.prefill_response)})
    extra["add_generation_prompt" if args.prefill_response is None else "continue_final_message"] = True
    prompt = rendered(tokenizer, messages, HINT, **extra)
    if in_cache:
        # The cache already holds what the template writes before the question.
        messages[-1]["content"] = "<query>"
        prompt = prompt[max(0, rendered(tokenizer, messages, HINT, **extra).find("<query>")) :]
    return list(encode(prompt, add_special_tokens=False))


def cache_prompt(args: argparse.Namespace) -> None:
    if args.kv_disk == "on":
        raise UsageError("--kv-disk on: cache-prompt needs the whole KV cache in memory; leave the flag out")
    folder = resolve_model(args.model, args.revision)
    settings = {"trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(folder, settings)
    text = prompt_text(args.prompt)
    check_characters(len(text), longest_context(config_of(folder)))
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
