"""``outcore generate``: answer a prompt. Flags and their meaning are those of ``mlx_lm.generate``."""

from __future__ import annotations

import argparse
import io
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.lazy_model import config_of
from ..checkpoint.prompt_cache import open_prompt_cache
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.generate import stream_generate
from ..decode.prompt import cached_tokens
from ..decode.sampling import make_sampler
from ..engine.session import Session
from ..errors import UsageError
from ..loading.loader import load_model
from ..machine.settings import setting
from ..modules.cache_form import check_cache
from ..options import whole
from ..text import counted, one_line
from .arguments import check_max_tokens, check_window, engine_options, template_options, text_of
from .engine import (
    check_sampling_flags,
    draft_options,
    engine_record,
    print_summary,
    progress_bar,
    sweep_progress,
    watched,
)
from .model_folder import model_folder
from .output import say
from .preset import Preset
from .stop_strings import until_stop

KV_BITS, KV_GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
"""What MLX quantizes to."""


class AnswerOutput:
    """An answer as it is made.

    Attributes:
        ttft: seconds until its first token.
        finish: why it ended.
    """

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.last: GenerationResponse | None = None
        self.ttft = 0.0
        self.finish = "memory"
        self._began = time.perf_counter()

    def add(self, response: GenerationResponse) -> None:
        """One token more."""
        if self.last is None:
            self.ttft = time.perf_counter() - self._began
        self.last = response
        self.text += response.text
        self.tokens.append(response.token)
        self.finish = response.finish_reason or self.finish

    def record(self) -> dict[str, Any]:
        """For JSON."""
        last = self.last
        assert last is not None
        return {
            "text": self.text,
            "prompt_tokens": last.prompt_tokens,
            "generation_tokens": last.generation_tokens,
            "prompt_tps": round(last.prompt_tps, 4),
            "generation_tps": round(last.generation_tps, 4),
            "ttft_s": round(self.ttft, 4),
            "finish_reason": last.finish_reason,
            "tokens": self.tokens,
        }


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    check_max_tokens(args.max_tokens)
    draft, drafting = draft_options(args)
    check_cache_flags(args)
    check_window(args)
    if args.seed is not None:
        mx.random.seed(whole("--seed", args.seed, 0, 2**64 - 1))
    cache, tokenizer_config = prompt_cache(args)
    folder = model_folder(args)
    tokenizer = load_tokenizer(
        folder,
        {**tokenizer_config, "trust_remote_code": args.trust_remote_code},
        eos=config_of(folder).get("eos_token_id"),
        extra_eos=args.extra_eos_token,
    )
    check_sampling_flags(args, folder, tokenizer)
    preset: Preset = args.preset
    preset.prepare(tokenizer, config_of(folder), template=not args.ignore_chat_template, cached=cache is not None)
    prompt = encode_prompt(tokenizer, args, in_cache=cache is not None)
    if not prompt:
        raise UsageError("--prompt: it is empty; give at least one token")
    args.max_tokens = preset.answer_tokens(len(prompt) + _cached_tokens(cache), args.max_tokens)
    with progress_bar() as bar:
        model, _ = load_model(
            folder,
            **engine_options(args),
            draft=draft,
            # What the cache file holds counts too, but mlx-lm does not say how many tokens that is before it is used.
            context=None if args.max_tokens < 0 else len(prompt) + args.max_tokens + _cached_tokens(cache),
            prompt=len(prompt),
            resumable=cache is not None,
            prefix_cache=args.prefix_cache,
            prefill_step_size=args.prefill_step_size,
            trust_remote_code=args.trust_remote_code,
            adapter_path=args.adapter_path,
            model_config={"quantize_activations": True} if args.quantize_activations else None,
            progress=bar,
        )
        with watched(model, args) as session:
            held = _cached_tokens(cache)
            check_cache(session.forms, cache, f"--prompt-cache-file {args.prompt_cache_file}")
            options = {**_generation_options(args, tokenizer), **drafting, "prompt_cache": cache}
            responses = until_stop(stream_generate(model, tokenizer, prompt, **options), preset.stop)
            answer = _print_answer(responses, sweep_progress(bar, session))
            note_unquantized(args, session, held + len(prompt) + len(answer.tokens))
            if session.text is not None:
                gone = len(prompt) + len(answer.tokens) - len(session.text)
                session.note(
                    f"{counted(gone, 'older token')} went, {len(session.text)} stay: --kv-eviction halve with "
                    f"--max-kv-size {args.max_kv_size}"
                )
            if args.verbose:
                print_summary(_speeds(answer), session)
            args.result.record = answer.record() | engine_record(session)


def _generation_options(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    """The flags as arguments of ``stream_generate``."""
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        coupled=args.seed is not None,
    )
    names = ("max_tokens", "max_kv_size", "kv_eviction", "kv_bits", "kv_group_size", "quantized_kv_start")
    step = {"prefill_step_size": args.prefill_step_size} if args.prefill_step_size else {}
    chosen = {"sampler": sampler, **args.preset.options()}
    return chosen | {name: getattr(args, name) for name in names} | step


def _print_answer(responses: Iterable[GenerationResponse], first_token: Callable[[], None]) -> AnswerOutput:
    answer = AnswerOutput()
    for response in responses:
        answer.add(response)
        if len(answer.tokens) == 1:
            first_token()
        say(response.text)
    print(flush=True)
    return answer


def check_cache_flags(args: argparse.Namespace) -> None:
    if args.kv_bits is not None and args.kv_bits not in KV_BITS:
        raise UsageError(f"--kv-bits {args.kv_bits}: choose from {', '.join(map(str, KV_BITS))}")
    if args.kv_group_size not in KV_GROUPS:
        raise UsageError(f"--kv-group-size {args.kv_group_size}: choose from {', '.join(map(str, KV_GROUPS))}")
    whole("--quantized-kv-start", args.quantized_kv_start, 0)
    if args.max_kv_size is not None:
        whole("--max-kv-size", args.max_kv_size)


def note_unquantized(args: argparse.Namespace, session: Session, tokens: int) -> None:
    """Tell of a text of so many tokens that ``--kv-bits`` did nothing for: mlx-lm begins late with it."""
    # The last token is not in the caches.
    if args.kv_bits is not None and tokens - 1 < args.quantized_kv_start:
        start = f"begins at token {args.quantized_kv_start} (--quantized-kv-start)"
        session.note(f"--kv-bits {args.kv_bits} {start}: nothing of these {tokens} was quantized")


def prompt_cache(args: argparse.Namespace) -> tuple[list[Any] | None, dict[str, Any]]:
    """What ``--prompt-cache-file`` holds, and what it says of the tokenizer. Without ``--model`` it says of the model,
    too.

    Raises:
        UsageError: it is no such file, was made with another model, or there is none.
    """
    if args.prompt_cache_file is None:
        return None, {}
    cache, settings, model = open_prompt_cache(Path(args.prompt_cache_file), args.model)
    if args.model is None:
        settled = setting("model") if model is None else None
        args.model = model if settled is None else settled.value
    if not args.model:
        raise UsageError(
            f"--prompt-cache-file {args.prompt_cache_file}: does not say of which model; give --model NAME"
        )
    return cache, settings


def _cached_tokens(cache: list[Any] | None) -> int:
    if not cache:
        return 0
    try:
        return cached_tokens(cache)
    except (AttributeError, TypeError, ValueError, IndexError):
        return 0  # it will be refused


def encode_prompt(tokenizer: TokenizerWrapper, args: argparse.Namespace, in_cache: bool) -> list[int]:
    """The prompt's token ids, through the chat template unless there is none or it is not wanted; as mlx-lm does.

    Raises:
        UsageError: what was given is no text, or nothing that the template takes.
    """
    text = standard_input() if args.prompt == "-" else args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text_of("--prompt", text)
    extra = template_options(args.chat_template_config)
    if args.ignore_chat_template or not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [*map(dict, args.preset.messages), {"role": "user", "content": text}]
    if args.system_prompt is not None:
        messages.insert(0, {"role": "system", "content": text_of("--system-prompt", args.system_prompt)})
    if args.prefill_response is not None:
        messages.append({"role": "assistant", "content": text_of("--prefill-response", args.prefill_response)})

    def render() -> str:
        try:
            rendered = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                continue_final_message=args.prefill_response is not None,
                add_generation_prompt=args.prefill_response is None,
                **extra,
            )
        except Exception as e:  # a template is code that comes with the model: it raises what it likes
            raise UsageError(
                f"the model's chat template refuses this: {one_line(e)}; try it without --system-prompt and "
                "--chat-template-config, or with --ignore-chat-template"
            ) from e
        return text_of("the chat template's text", str(rendered))

    rendered = render()
    if in_cache:
        # What stands before the question is in the cache already.
        messages[-1]["content"] = "<query>"
        rendered = rendered[max(0, render().find("<query>")) :]
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def standard_input() -> str:
    """All of it, as text.

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    try:
        return sys.stdin.read() if isinstance(sys.stdin, io.StringIO) else sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"--prompt -: standard input is not UTF-8 at byte {e.start}; convert it") from e
    except OSError as e:
        raise UsageError(f"--prompt -: standard input cannot be read: {e.strerror or e}") from e


def _speeds(answer: AnswerOutput) -> list[str]:
    last = answer.last
    assert last is not None
    return [
        f"Prompt: {counted(last.prompt_tokens, 'token')}, {answer.ttft:.2f} s to the first token",
        f"Generation: {counted(last.generation_tokens, 'token')}, {last.generation_tps:.3f} tokens per second",
    ]
