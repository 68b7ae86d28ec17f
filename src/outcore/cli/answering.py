"""Shared by ``generate``, ``chat`` and ``cache-prompt``: prompts, sampling options, printing an answer, Ctrl-C."""

from __future__ import annotations

import argparse
import io
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from mlx_lm.generate import GenerationResponse
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..checkpoint.positions import config_of
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.sampling import SAMPLING, check_sampling, make_sampler
from ..decode.speculative.drafting import check_draft_length
from ..engine.session import Session
from ..errors import UsageError
from ..serve.parsing import Stopper
from ..text import one_line
from .arguments import cache_options, text_of
from .engine import model_folder
from .output import say


def open_tokenizer(
    args: argparse.Namespace, settings: Mapping[str, Any], **preset: bool
) -> tuple[Path, TokenizerWrapper]:
    """Finds the model's folder and loads its tokenizer; ``preset`` holds arguments of ``Preset.prepare``."""
    folder = model_folder(args)
    config = config_of(folder)
    settings = {**settings, "trust_remote_code": args.trust_remote_code}
    tokenizer = load_tokenizer(folder, settings, eos=config.get("eos_token_id"), extra_eos=args.extra_eos_token)
    text = config.get("text_config")
    given = (part.get("vocab_size") for part in (config, text if isinstance(text, dict) else {}))
    sizes = [n for n in given if isinstance(n, int) and n > 0] or [len(tokenizer.get_vocab())]
    check_sampling(**{name: getattr(args, name) for name in SAMPLING if hasattr(args, name)}, vocabulary=sizes[0])
    args.preset.prepare(tokenizer, **preset)
    return folder, tokenizer


def draft_tokens(args: argparse.Namespace) -> dict[str, int]:
    """``--num-draft-tokens`` as an argument of ``stream_generate``."""
    most = args.num_draft_tokens
    return {} if most is None else {"num_draft_tokens": check_draft_length(most, "--num-draft-tokens")}


def generation_options(args: argparse.Namespace, tokenizer: TokenizerWrapper) -> dict[str, Any]:
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        getattr(args, "min_tokens_to_keep", 1),
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
        coupled=args.seed is not None,
    )
    basic = {"sampler": sampler, "max_tokens": args.max_tokens}
    return basic | args.preset.options() | cache_options(args) | draft_tokens(args)


def note_unquantized(args: argparse.Namespace, session: Session, tokens: int) -> None:
    """Notes when a text was too short for ``--kv-bits``: by default quantizing begins at token 5000, as in mlx-lm."""
    # The last token is not in the caches.
    if args.kv_bits is not None and tokens - 1 < args.quantized_kv_start:
        start = f"begins at token {args.quantized_kv_start} (--quantized-kv-start)"
        session.note(f"--kv-bits {args.kv_bits} {start}: none of the {tokens} tokens was quantized")


def prompt_text(given: str) -> str:
    try:
        if given == "-":
            given = sys.stdin.read() if isinstance(sys.stdin, io.StringIO) else sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as e:
        raise UsageError(f"--prompt -: standard input is not UTF-8 at byte {e.start}; convert it") from e
    except OSError as e:
        raise UsageError(f"--prompt -: standard input cannot be read: {e.strerror or e}") from e
    return text_of("--prompt", given)


def rendered(tokenizer: TokenizerWrapper, messages: list[dict[str, str]], hint: str = "", **options: Any) -> str:
    """Applies the chat template as mlx-lm does; ``hint`` ends the error message where that fails."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    except Exception as e:  # a template is code that comes with the model and may raise anything
        raise UsageError(f"the model's chat template refuses this: {one_line(e)}{hint}") from e
    return text_of("the chat template's text", str(text))


class AnswerOutput:
    """Prints and records one answer while it is generated.

    Attributes:
        ttft: seconds to the first token.
        finish: the finish reason.
        cut: whether a stop string ended the answer; ``tokens`` contain it, ``text`` does not.
    """

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.last: GenerationResponse | None = None
        self.ttft = 0.0
        self.finish, self.cut = "memory", False
        self._began = time.perf_counter()

    def shown(
        self, responses: Iterator[GenerationResponse], stops: Sequence[str], begun: Callable[[], None]
    ) -> Generator[GenerationResponse, None, None]:
        """Yields the responses up to the first stop string, and writes their text to standard output.

        Text that may be the beginning of a stop string is held back until that is decided. ``begun`` is called with
        the first response.
        """
        stopper = Stopper(stops)
        # Closed at once: only then do the caches hold the whole answer.
        with closing(responses):  # type: ignore[type-var]
            for response in responses:
                text, reason = stopper.feed(response.text), response.finish_reason
                self.cut = stopper.found is not None
                if self.cut:
                    reason = "stop"
                elif reason is not None:
                    text += stopper.finish()
                if self.last is None:
                    begun()
                    self.ttft = time.perf_counter() - self._began
                self.last = replace(response, text=text, finish_reason=reason)
                self.text += text
                self.tokens.append(response.token)
                self.finish = reason or self.finish
                say(text)
                yield self.last
                if self.cut:
                    return

    def record(self) -> dict[str, Any]:
        last = self.last
        assert last is not None
        return {
            "text": self.text,
            "prompt_tokens": last.prompt_tokens,
            "generation_tokens": last.generation_tokens,
            "prompt_tps": round(last.prompt_tps, 4),
            "generation_tps": round(last.generation_tps, 4),
            "ttft_s": round(self.ttft, 4),
            "finish_reason": self.finish,
            "tokens": self.tokens,
        }


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Yields a function that tells whether Ctrl-C was pressed inside the block.

    Only a second Ctrl-C raises KeyboardInterrupt. A process that ignores Ctrl-C, as in the background, still does.
    """
    ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    if ignored or threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    received: list[int] = []

    def note(number: int, _: object) -> None:
        received.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(received)
    finally:
        signal.signal(signal.SIGINT, before)
