"""One choice (one of the answers to a request, as in OpenAI's ``n``): from a scheduler request to answer events."""

from __future__ import annotations

import copy
import itertools
import logging
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import BPEStreamingDetokenizer, SPMStreamingDetokenizer, TokenizerWrapper

from ..decode.request import Request, Token
from ..decode.sampling import SAMPLING, MlxLmSampler, OwnSampler, own_sampler
from ..errors import BudgetError, LinkError, OutcoreError, PromptError, RequestError
from ..modules.mlx_lm_tokenizer import byte_decoder
from ..text import one_line
from .events import Called, Ended, Event, GenerationRequest, TextPart, TokenLogprob
from .parsing import Stopper
from .prompting import Prompt

log = logging.getLogger("outcore.serve")

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
UIDS = itertools.count()


def request_of(uid: int, prompt: Prompt, request: GenerationRequest) -> Request:
    """The scheduler's request; made on the thread that computes, since it holds MLX arrays."""
    sampling, values = request.sampling, vars(request.sampling)
    named: dict[str, Any] = {name: values[name] for name in SAMPLING if name in values}
    if sampling.xtc_probability:  # as in mlx_lm.server
        named["xtc_special_tokens"] = [*prompt.tokenizer.encode("\n"), *prompt.tokenizer.eos_token_ids]
    sampler = own_sampler(sampling.temperature, seed=sampling.seed, **named)
    options: dict[str, Any] = {}
    for kind, none in (("repetition", 1), ("presence", 0), ("frequency", 0)):
        penalty, size = values[f"{kind}_penalty"], values[f"{kind}_context_size"]
        if penalty != none and size:
            options |= {f"{kind}_penalty": penalty, f"{kind}_context_size": size}
    processors = make_logits_processors(dict(sampling.logit_bias) or None, **options)
    if prompt.grammar is not None:
        processors.append(prompt.grammar(len(prompt.tokens)))
    if sampling.post_sampling_probs:
        processors.append((sampler or OwnSampler(MlxLmSampler(1.0, top_k=1))).narrow)
        sampler = sampler and own_sampler(1.0, seed=sampling.seed)
    return Request(
        uid, prompt.tokens, request.max_tokens or 1, sampler, tuple(processors),
        stop=prompt.stop, logprobs=request.logprobs, shared=prompt.shared, media=copy.copy(prompt.media),
    )  # fmt: skip


class AnswerChoice:
    """A choice and the text that was generated for it until now.

    Args:
        index: its number in the answer.
        request: with the model's own name, this choice's ``max_tokens`` and seed.
        tell: called on the engine's thread with each event; the last is ``Ended`` or an exception.

    Attributes:
        asked_at: time of submission, by ``time.monotonic``.
        drafted, accepted: tokens proposed by the drafter, and those that the model accepted.
        tokens: number of tokens generated until now, ``reasoning_tokens`` included.
        wanted: the client still waits for this choice.
        started: the scheduler has received this choice.
    """

    def __init__(
        self, index: int, request: GenerationRequest, prompt: Prompt, tell: Callable[[Event | Exception], None]
    ) -> None:
        self.uid, self.request, self.prompt, self.tell = next(UIDS), request, prompt, tell
        self.asked_at = time.monotonic()
        self.drafted = self.accepted = self.tokens = self.reasoning_tokens = 0
        self.wanted, self.started = True, False
        self._text, self._stopper = prompt.tokenizer.detokenizer, Stopper(prompt.stop)
        self._parser = prompt.parser(index)
        self._logprobs: list[TokenLogprob] = []

    def add(self, token: Token) -> list[Event]:
        self.tokens += 1
        self.reasoning_tokens += self._parser.thinking
        ends = token.token in self.prompt.tokenizer.eos_token_ids
        if not ends:
            self._text.add_token(token.token)
        if token.logprob is not None:
            top = tuple(self._logprob(each, value) for each, value in token.top)
            self._logprobs.append(self._logprob(token.token, token.logprob, top))
        events = self._with_logprobs(self._parser.feed(self._stopper.feed(self._text.last_segment)))
        if ends or self._stopper.found is not None or self._parser.over:
            return [*events, *self.end("stop")]
        return [*events, *self.end("length")] if self.tokens >= (self.request.max_tokens or 1) else events

    def end(self, reason: Literal["stop", "length"]) -> list[Event]:
        self._text.finalize()
        rest = self._stopper.feed(self._text.last_segment) + self._stopper.finish()
        stop = self._stopper.found
        reason = "stop" if stop is not None else reason
        events = self._with_logprobs([*self._parser.feed(rest), *self._parser.finish(reason == "length")])
        if self._logprobs:
            events.append(TextPart(self._parser.index, logprobs=tuple(self._logprobs)))
        called = self._parser.ids and reason == "stop" and stop is None
        why: Literal["stop", "length", "tool_calls"] = "tool_calls" if called else reason
        return [*events, Ended(self._parser.index, why, self.tokens, self.reasoning_tokens, stop)]

    def _with_logprobs(self, pieces: Sequence[TextPart | Called]) -> list[Event]:
        found: list[Event] = []
        for piece in pieces:
            if self._logprobs and isinstance(piece, TextPart):
                piece, self._logprobs = replace(piece, logprobs=tuple(self._logprobs)), []
            found.append(piece)
        return found

    def _logprob(self, token: int, logprob: float, top: tuple[TokenLogprob, ...] = ()) -> TokenLogprob:
        """The log-probability with the token's bytes; the first token loses its space, as the text does."""
        data = token_bytes(self.prompt.tokenizer, type(self._text), token)
        trims = getattr(self._text, "trim_space", isinstance(self._text, BPEStreamingDetokenizer))
        if self.tokens == 1 and trims:
            data = data.removeprefix(b" ")
        return TokenLogprob(token, data.decode("utf-8", "replace"), data, logprob, top)


def token_bytes(tokenizer: TokenizerWrapper, kind: type, token: int) -> bytes:
    """A token's bytes, which may be part of a character; empty for an unknown token. ``kind``: its detokenizer's."""
    name = tokenizer.convert_ids_to_tokens(token)
    if name is None:
        return b""
    known = byte_decoder() if issubclass(kind, BPEStreamingDetokenizer) else {}
    if known and all(c in known for c in name):
        return bytes(known[c] for c in name)
    if issubclass(kind, SPMStreamingDetokenizer):
        byte = BYTE_TOKEN.fullmatch(name)
        return bytes([int(byte[1], 16)]) if byte else str(name).replace("\u2581", " ").encode()
    return str(tokenizer.decode([token])).encode()


def as_request_error(error: Exception, choice: AnswerChoice | None = None) -> RequestError:
    """Converts an error to the one that a client gets; ``choice``: the only choice that the error concerns."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, LinkError):
        why = "a machine that shares the model has failed; the server's log says which"
        return RequestError(why, "internal_error", status=500)
    if isinstance(error, PromptError):
        return RequestError(one_line(error), "context_length_exceeded")
    if isinstance(error, BudgetError) and choice is not None and not choice.tokens:
        tokens = len(choice.prompt.tokens)
        return RequestError(f"a prompt of {tokens} tokens: {one_line(error)}", "context_length_exceeded")
    if isinstance(error, BudgetError | MemoryError):
        return RequestError(one_line(error) or "no memory", "insufficient_memory", status=503)
    if not isinstance(error, OutcoreError):
        log.error("a request failed", exc_info=error)
    return RequestError(f"{type(error).__name__}: {one_line(error)}", "internal_error", status=500)
