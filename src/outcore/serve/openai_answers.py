"""Answers of OpenAI's chat completions and completions; its words for usage, log-probabilities and errors."""

from __future__ import annotations

import codecs
import math
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ..version import __version__
from .api import ResponseWriter, server_sent
from .events import Begun, Called, Ended, Event, Finished, RequestError, TextPart, TokenLogprob

FINGERPRINT = f"build-outcore-{__version__}"
LEAST_LOGPROB = -9999.0
"""OpenAI's number for what is as good as impossible; JSON has no infinity."""

TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def new_id(prefix: str) -> str:
    """An id that no other answer has."""
    return f"{prefix}{secrets.token_hex(12)}"


class ChoicesWriter(ResponseWriter):
    """Writes an answer of choices, whole or in chunks of one id.

    Args:
        choices: of all prompts together.
        usage: a stream ends with the counts of tokens.
    """

    prefix, kinds = "", ("", "")
    """Of ids; and ``object`` of a whole answer and of a chunk."""

    def __init__(
        self, streams: bool, ignored: Sequence[str], choices: int = 1, *, logprobs: bool = False, usage: bool = False
    ) -> None:
        super().__init__(streams, ignored)
        self.choices, self.logprobs, self.usage = choices, logprobs, usage
        self._of_all = {"id": new_id(self.prefix), "object": "", "created": int(time.time()), "model": "",
                        "system_fingerprint": FINGERPRINT}  # fmt: skip

    def event(self, event: Event) -> bytes:
        chunk = self._of_all | {"object": self.kinds[1]}
        if isinstance(event, Begun):
            chunk["model"] = self._of_all["model"] = event.model
        if isinstance(event, Finished):
            more: dict[str, Any] = {"choices": [], "usage": usage(event), "timings": timings(event)}
            return server_sent(chunk | more) if self.usage else b""
        more = {"usage": None} if self.usage else {}
        return b"".join(server_sent(chunk | {"choices": [choice]} | more) for choice in self.deltas(event))

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failed(self, error: RequestError) -> bytes:
        return server_sent(error_body(error))

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        finished, said = Finished(0, 0), defaultdict[int, list[Event]](list)
        for event in events:
            if isinstance(event, Begun):
                self._of_all["model"] = event.model
            elif isinstance(event, Finished):
                finished = event
            else:
                said[event.index].append(event)
        choices = [self.choice(i, said[i]) for i in range(self.choices)]
        more = {"choices": choices, "usage": usage(finished), "timings": timings(finished)}
        return self._of_all | {"object": self.kinds[0]} | more

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        """The choices of the chunks that tell an event."""
        raise NotImplementedError

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        """A whole choice, of its own events."""
        raise NotImplementedError


def _reason(events: Sequence[Event]) -> str:
    return next((e.reason for e in events if isinstance(e, Ended)), "stop")


class ChatWriter(ChoicesWriter):
    prefix, kinds = "chatcmpl-", ("chat.completion", "chat.completion.chunk")

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        if isinstance(event, Begun):
            for index in range(self.choices):
                yield self._delta(index, {"role": "assistant", "content": None})
        elif isinstance(event, TextPart) and (event.text or event.reasoning or event.logprobs):
            thought = {"reasoning_content": event.reasoning, "reasoning": event.reasoning} if event.reasoning else {}
            said = {"content": event.text} if event.text or not thought else {}
            yield self._delta(event.index, thought | said) | {"logprobs": self._logprobs([event])}
        elif isinstance(event, Called):
            call = {"index": event.number, **_call(event)}
            named = call | {"function": call["function"] | {"arguments": ""}}
            for part in (named, {"index": event.number, "function": {"arguments": event.arguments}}):
                yield self._delta(event.index, {"tool_calls": [part]}) | {"logprobs": self._logprobs([])}
        elif isinstance(event, Ended):
            yield self._delta(event.index, {}) | {"finish_reason": event.reason}

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        pieces = [e for e in events if isinstance(e, TextPart)]
        text, thought = "".join(p.text for p in pieces), "".join(p.reasoning for p in pieces)
        calls = [_call(e) for e in events if isinstance(e, Called)]
        message: dict[str, Any] = {"role": "assistant", "content": None if calls and not text else text}
        message["refusal"] = None
        if thought:
            message |= {"reasoning_content": thought, "reasoning": thought}
        if calls:
            message["tool_calls"] = calls
        told = self._logprobs(pieces)
        return {"index": index, "message": message, "logprobs": told, "finish_reason": _reason(events)}

    def _delta(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _logprobs(self, pieces: Sequence[TextPart]) -> dict[str, Any] | None:
        """Of the answer's tokens; those of what is thought are not told, as OpenAI does."""
        if not self.logprobs:
            return None
        told = [entry for p in pieces if p.text or not p.reasoning for entry in logprob_entries(p.logprobs)]
        return {"content": told, "refusal": None}


class CompletionWriter(ChoicesWriter):
    prefix, kinds = "cmpl-", ("text_completion", "text_completion")

    def __init__(self, streams: bool, ignored: Sequence[str], choices: int = 1, **more: bool) -> None:
        super().__init__(streams, ignored, choices, **more)
        decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(choices)]
        self._decoders, self._passed = decoders, [0] * choices

    def deltas(self, event: Event) -> Iterable[dict[str, Any]]:
        # Whoever continues a text wants all of it, what was thought too.
        if isinstance(event, TextPart) and (event.text or event.reasoning or event.logprobs):
            told = self._logprobs(event.index, event.logprobs)
            yield {"index": event.index, "text": event.reasoning + event.text, "logprobs": told, "finish_reason": None}
        elif isinstance(event, Ended):
            yield {"index": event.index, "text": "", "logprobs": None, "finish_reason": event.reason}

    def choice(self, index: int, events: Sequence[Event]) -> dict[str, Any]:
        pieces = [e for e in events if isinstance(e, TextPart)]
        text, told = "".join(p.reasoning + p.text for p in pieces), [token for p in pieces for token in p.logprobs]
        return {"index": index, "text": text, "logprobs": self._logprobs(index, told), "finish_reason": _reason(events)}

    def _logprobs(self, index: int, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        offsets = []
        for token in tokens:  # a character of several tokens counts with its last
            offsets.append(self._passed[index])
            self._passed[index] += len(self._decoders[index].decode(token.data))
        return {
            "tokens": [_name(token) for token in tokens],
            "token_logprobs": [finite(token.logprob) for token in tokens],
            "top_logprobs": [{_name(other): finite(other.logprob) for other in t.top} for t in tokens],
            "text_offset": offsets,
        }


def _name(token: TokenLogprob) -> str:
    """A token in OpenAI's older form: its bytes, if it is no text by itself."""
    try:
        return token.data.decode() or token.text
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)


def _call(event: Called) -> dict[str, Any]:
    return {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": event.arguments}}


def finite(logprob: float) -> float:
    """A log-probability that JSON can say."""
    return logprob if math.isfinite(logprob) else LEAST_LOGPROB


def logprob_entries(logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens as chats and responses, and Ollama, tell them."""

    def entry(token: TokenLogprob) -> dict[str, Any]:
        return {"token": token.text, "logprob": finite(token.logprob), "bytes": list(token.data)}

    return [entry(token) | {"top_logprobs": [entry(other) for other in token.top]} for token in logprobs]


def usage(finished: Finished) -> dict[str, Any]:
    """OpenAI's counts of tokens."""
    return {
        "prompt_tokens": finished.prompt_tokens,
        "completion_tokens": finished.tokens,
        "total_tokens": finished.prompt_tokens + finished.tokens,
        "prompt_tokens_details": {"cached_tokens": finished.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": finished.reasoning_tokens},
    }


def timings(finished: Finished) -> dict[str, Any]:
    """llama.cpp's times, which apps show: milliseconds, and tokens per second."""
    computed = finished.prompt_tokens - finished.cached_tokens
    found: dict[str, Any] = {"cache_n": finished.cached_tokens}
    for name, tokens, timed, seconds in (
        ("prompt", computed, computed, finished.prompt_s),
        # The time begins with the first token of each answer.
        ("predicted", finished.tokens, max(0, finished.tokens - finished.choices), finished.generation_s),
    ):
        found |= {f"{name}_n": tokens, f"{name}_ms": seconds * 1e3}
        found[f"{name}_per_second"] = timed / seconds if seconds > 0 else 0.0
    if finished.drafted:
        found |= {"draft_n": finished.drafted, "draft_n_accepted": finished.accepted}
    return found


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    if error.code == "context_length_exceeded":
        kind = "exceed_context_size_error"  # llama.cpp's, by which agents know that they have to shorten
    code = None if error.code == "invalid_request" else error.code
    return {"error": {"message": str(error), "type": kind, "param": error.param, "code": code, **error.counts}}
