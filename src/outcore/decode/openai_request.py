"""Bodies of OpenAI's API for completions and chats: what of them is understood, and what is refused with its reason.

Names, defaults and ranges are those of ``mlx_lm.server`` where it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
from mlx_lm.sample_utils import make_logits_processors
from mlx_lm.tokenizer_utils import TokenizerWrapper

from ..errors import RequestError
from .chat_prompt import check_ids, encode_rendered, encode_text, render
from .request_values import NUMBERS, logit_bias, number, stop_strings, template_options, text_content, whole_text
from .sampling import own_sampler

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
        {name: number(name, given[name], NUMBERS[name]) for name in NUMBERS if name in given},
        stop_strings(given.get("stop")),
        logit_bias(given.get("logit_bias"), ids),
    )


def _prompt(given: Mapping[str, Any], tokenizer: TokenizerWrapper, ids: Container[int]) -> list[int]:
    if "messages" in given:
        raise RequestError(f"messages: for {CHAT}; {COMPLETION} takes a prompt")
    prompt = given.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        prompt = encode_text(tokenizer, whole_text(prompt, "prompt"))
    if not isinstance(prompt, list) or not all(isinstance(t, int) and not isinstance(t, bool) for t in prompt):
        raise RequestError("prompt: one string, or one list of token ids, is needed")
    check_ids(prompt, ids)
    return prompt


def _chat(given: Mapping[str, Any], tokenizer: TokenizerWrapper) -> list[int]:
    if "prompt" in given:
        raise RequestError(f"prompt: for {COMPLETION}; {CHAT} takes messages")
    messages = given.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestError("messages: a list of at least one message is needed")
    if not tokenizer.has_chat_template:
        raise RequestError(f"this model has no chat template; send prompts to {COMPLETION}", "unsupported_url")
    extra = template_options(given.get("chat_template_kwargs"))
    chat = [_message(m, i) for i, m in enumerate(messages)]
    return encode_rendered(tokenizer, render(tokenizer, chat, extra, add_generation_prompt=True))


def _message(message: Any, number: int) -> dict[str, Any]:
    where = f"messages[{number}]"
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: an object with a role and a content is needed")
    if more := [k for k, v in message.items() if v and k not in ("role", "content", "name", "refusal")]:
        raise RequestError(f"{where}.{more[0]}: not supported", "unsupported_parameter")
    return {"role": message["role"], "content": text_content(message.get("content"), f"{where}.content")}
