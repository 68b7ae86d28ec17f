"""Bodies of OpenAI's API for completions and chats: what of them is understood, and what is refused with its reason.

Names, defaults and ranges are those of ``mlx_lm.server`` where it has them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError
from ..options import COUNT
from ..text import half_character, one_line, shortened
from .sampling import LEAST_TEMPERATURE, own_sampler

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
URLS = (CHAT, COMPLETION)

IGNORED = {"model", "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
"""Say nothing about the answer; the model is the one that was loaded."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,), "best_of": (1,), "stream": (False,), "echo": (False,), "suffix": ("",), "logprobs": (False,),
    "top_logprobs": (0,), "tools": ([],), "tool_choice": ("none", "auto"), "parallel_tool_calls": (True, False),
    "functions": ([],), "function_call": ("none", "auto"), "response_format": ({"type": "text"},),
    "modalities": (["text"],), "stream_options": (), "audio": (), "prediction": (), "reasoning_effort": (),
    "verbosity": (), "web_search_options": (),
}  # fmt: skip
"""What is known and not supported, but for these values, which ask for nothing."""

LARGE = 1e30
"""Numbers that logits are changed by are no larger: what they make of a logit is still a float32."""

NUMBERS: dict[str, tuple[type, float, float]] = {
    "temperature": (float, 0, LARGE), "top_p": (float, 0, 1), "min_p": (float, 0, 1), "top_k": (int, 0, COUNT),
    "seed": (int, -(2**63), 2**63 - 1), "max_tokens": (int, 1, COUNT), "max_completion_tokens": (int, 1, COUNT),
    "repetition_penalty": (float, 0, LARGE), "repetition_context_size": (int, 0, COUNT),
    "presence_penalty": (float, -LARGE, LARGE), "presence_context_size": (int, 0, COUNT),
    "frequency_penalty": (float, -LARGE, LARGE), "frequency_context_size": (int, 0, COUNT),
}  # fmt: skip
"""Whole numbers or any, least and most."""

OTHERS = {"messages", "prompt", "stop", "logit_bias", "chat_template_kwargs"}

PENALTIES = ("repetition", "presence", "frequency")


@dataclass(frozen=True)
class Body:
    """What is asked for.

    Attributes:
        tokens: ids of the prompt, a chat's through the model's template.
        numbers: of ``NUMBERS``, those that were given.
    """

    tokens: list[int]
    numbers: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @property
    def max_tokens(self) -> int | None:
        """Of the answer; None: not said."""
        found: int | None = self.numbers.get("max_completion_tokens", self.numbers.get("max_tokens"))
        return found

    def sampler(self) -> Callable[[mx.array], mx.array] | None:
        """A sampler of its own; None: the likeliest token, as where no temperature is given."""
        names = ("top_p", "min_p", "top_k", "seed")
        options = {name: self.numbers[name] for name in names if name in self.numbers}
        return own_sampler(self.numbers.get("temperature", 0.0), **options)

    def processors(self) -> tuple[Callable[[mx.array, mx.array], mx.array], ...]:
        """mlx-lm's logits processors for the penalties and the bias."""
        options: dict[str, Any] = {}
        for name in PENALTIES:
            penalty = self.numbers.get(f"{name}_penalty", 0)
            # No repetition is punished by 1, nor by 0, which mlx-lm takes for none.
            if penalty != (1 if name == "repetition" else 0) and self.numbers.get(f"{name}_context_size", 1):
                options[f"{name}_penalty"] = penalty
        sizes = (f"{name}_context_size" for name in PENALTIES)
        options |= {size: self.numbers[size] for size in sizes if size in self.numbers}
        return tuple(make_logits_processors(dict(self.logit_bias) or None, **options))


def parse_body(body: Any, url: str, tokenizer: TokenizerWrapper, ids: Container[int]) -> Body:
    """The body of a request to one of ``URLS``.

    Args:
        ids: all of the tokenizer's tokens.

    Raises:
        RequestError: it is malformed, or asks for something that is not supported.
    """
    if not isinstance(body, dict):
        raise RequestError("body: not a JSON object")
    given = {name: value for name, value in body.items() if value is not None}
    known = {*IGNORED, *NEUTRAL, *NUMBERS, *OTHERS}
    for name, value in given.items():
        if name not in known:
            raise RequestError(f"{name}: no such parameter", "unknown_parameter")
        if name in NEUTRAL and not any(value == v and type(value) is type(v) for v in NEUTRAL[name]):
            raise RequestError(f"{name}: not supported; leave it out", "unsupported_parameter")
    return Body(
        _chat(given, tokenizer) if url == CHAT else _prompt(given, tokenizer, ids),
        {name: _number(name, given[name]) for name in NUMBERS if name in given},
        _stop(given.get("stop")),
        _bias(given.get("logit_bias"), ids),
    )


def _number(name: str, value: Any) -> Any:
    kind, least, most = NUMBERS[name]
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole and (kind is int or not isinstance(value, float)):
        raise RequestError(f"{name}: {'a whole number' if kind is int else 'a number'} is needed")
    # Whole numbers of JSON have no end: they are compared, and no float is made of them.
    if value != value or value in (math.inf, -math.inf):
        raise RequestError(f"{name}: {value} is out of range; a finite number is needed")
    if not least <= value <= most:
        bounds = f"at least {least:g}" if value < least else f"at most {most:g}"
        bounds = f"from {least:g} to {most:g}" if most == 1 else bounds
        raise RequestError(f"{name}: {shortened(value)} is out of range; {bounds}")
    if name == "temperature" and 0 < value < LEAST_TEMPERATURE:
        raise RequestError(f"{name}: {value} is out of range; 0, or at least {LEAST_TEMPERATURE:g}")
    return value


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value or []
    if not isinstance(stops, list) or not all(isinstance(s, str) and s for s in stops):
        raise RequestError("stop: a string, or a list of strings, none of them empty")
    return tuple(stops)


def _bias(value: Any, ids: Container[int]) -> dict[int, float]:
    try:
        bias = {int(token): float(add) for token, add in (value or {}).items()}
    except (AttributeError, TypeError, ValueError):
        raise RequestError("logit_bias: an object of token ids and numbers is needed") from None
    except OverflowError:
        raise RequestError(f"logit_bias: a number is out of range; from {-LARGE:g} to {LARGE:g}") from None
    if unknown := [token for token in bias if token not in ids]:
        raise RequestError(f"logit_bias: the model has no token {shortened(unknown[0])}")
    if not all(-LARGE <= add <= LARGE for add in bias.values()):
        raise RequestError(f"logit_bias: numbers must be finite, from {-LARGE:g} to {LARGE:g}")
    return bias


def _prompt(given: Mapping[str, Any], tokenizer: TokenizerWrapper, ids: Container[int]) -> list[int]:
    if "messages" in given:
        raise RequestError(f"messages: for {CHAT}; {COMPLETION} takes a prompt")
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        special = tokenizer.bos_token is None or not prompt.startswith(tokenizer.bos_token)
        prompt = list(tokenizer.encode(_whole(prompt, "prompt"), add_special_tokens=special))
    if not isinstance(prompt, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        raise RequestError("prompt: one string, or one list of token ids, is needed")
    if unknown := [t for t in prompt if t not in ids]:
        raise RequestError(f"prompt: the model has no token {shortened(unknown[0])}")
    if not prompt:
        raise RequestError("prompt: it is empty; give at least one token")
    return prompt


def _chat(given: Mapping[str, Any], tokenizer: TokenizerWrapper) -> list[int]:
    if "prompt" in given:
        raise RequestError(f"prompt: for {COMPLETION}; {CHAT} takes messages")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: a list of at least one message is needed")
    if not tokenizer.has_chat_template:
        raise RequestError(f"this model has no chat template; send prompts to {COMPLETION}", "unsupported_url")
    extra = given.get("chat_template_kwargs", {})
    if not isinstance(extra, dict):
        raise RequestError("chat_template_kwargs: not a JSON object")
    chat = [_message(m, i) for i, m in enumerate(messages)]
    try:
        text = str(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **extra))
    except Exception as e:  # a template is code that comes with the model: it raises what it likes
        raise RequestError(f"messages: the chat template refuses them: {one_line(e)}") from e
    tokens: list[int] = list(tokenizer.encode(_whole(text, "messages"), add_special_tokens=False))
    if not tokens:
        raise RequestError("messages: they are empty; give at least one token")
    return tokens


def _whole(text: str, where: str) -> str:
    """The text, if it is one: JSON can escape half of a surrogate pair, which no tokenizer takes."""
    if (at := half_character(text)) is not None:
        raise RequestError(f"{where}: character {at} is half of a surrogate pair; write the pair, or the character")
    return text


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: an object with a role and a content is needed")
    if more := [k for k, v in message.items() if v and k not in ("role", "content", "name", "refusal")]:
        raise RequestError(f"{where}.{more[0]}: not supported", "unsupported_parameter")
    return {"role": message["role"], "content": _content(message.get("content"), where)}


def _content(content: Any, where: str) -> str:
    parts: Sequence[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    if not isinstance(parts, list) or not parts or not all(isinstance(p, dict) for p in parts):
        raise RequestError(f"{where}.content: a string, or a list of text parts, is needed")
    for part in parts:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"{where}.content: only text is supported", "unsupported_parameter")
    return "".join(part["text"] for part in parts)
