"""Bodies of llama.cpp's ``/completion``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..decode.request_values import LARGE, number, whole_text
from ..options import COUNT
from .endpoint import Defaults
from .exchange import GenerationRequest, RequestError, Sampling
from .fields import Fields
from .openai_completions import MOST_PROMPTS
from .openai_fields import TOP_LOGPROBS, json_schema

MOST_BIASED = 1024
"""Tokens and texts whose logits are changed: each text is made into tokens."""

Prompt = str | tuple[int | str, ...]

SAYS_NOTHING = (
    "cache_prompt", "id_slot", "samplers", "min_keep", "dynatemp_exponent", "mirostat_tau", "mirostat_eta", "dry_base",
    "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "t_max_predict_ms", "n_cache_reuse",
    "backend_sampling",
)  # fmt: skip
"""Fields about llama.cpp's inside, or of samplers that other fields turn on."""


@dataclass(frozen=True)
class LlamaRequest:
    """A request.

    Attributes:
        prompts: as the client gave them. ``several``: they are told as a list.
        settings: what holds for the answer, in llama.cpp's words.
        response_fields: of the body that is told, such as ``generation_settings/seed``; none: all.
    """

    streams: bool
    asks: tuple[GenerationRequest, ...]
    prompts: tuple[Any, ...]
    several: bool
    settings: Mapping[str, Any]
    return_tokens: bool
    n_probs: int
    response_fields: tuple[str, ...]
    ignored: tuple[str, ...]


def completion(fields: Fields, defaults: Defaults) -> LlamaRequest:
    """A body.

    Raises:
        RequestError: it is malformed, or asks for what is not supported.
    """
    fields.ignore(*SAYS_NOTHING)
    fields.refuse(
        dry_multiplier=(0, 0.0), dynatemp_range=(0, 0.0), ignore_eos=(False,), image_data=([],), lora=([],),
        mirostat=(0,), n_discard=(0,), n_indent=(0,), n_keep=(0,), post_sampling_probs=(False,),
        return_progress=(False,), typical_p=(1, 1.0),
    )  # fmt: skip
    streams, n_probs = fields.flag("stream"), fields.number("n_probs", TOP_LOGPROBS) or 0
    prompts, several = _prompts(fields.take("prompt"))
    tokens = fields.number("n_predict", (int, -COUNT, COUNT))
    if tokens is None:
        tokens = fields.number("max_tokens", (int, -COUNT, COUNT))
    by_token, by_text = _bias(fields.take("logit_bias"))
    sampling = replace(_sampling(fields, defaults.sampling), logit_bias=by_token)
    returns = fields.flag("return_tokens")
    schema = None if fields.text("grammar") else json_schema(fields, "json_schema")
    ask = GenerationRequest(
        model=fields.text("model"),
        max_tokens=defaults.max_tokens if tokens is None or tokens <= 0 else tokens,
        sampling=sampling,
        stop=fields.stops(),
        logprobs=n_probs if n_probs or streams or returns else None,
        schema=schema,
        grammar=fields.text("grammar"),
        text_bias=by_text,
    )
    parts = fields.take("response_fields") or []
    if not isinstance(parts, list) or not all(isinstance(part, str) for part in parts):
        raise fields.error("response_fields", "a list of strings is needed")
    fields.ignore("timings_per_token")
    asks = tuple(replace(ask, prompt=prompt) for prompt in prompts)
    return LlamaRequest(
        streams, asks, prompts, several, _settings(ask, n_probs), returns, n_probs, tuple(parts), fields.unused()
    )


def _prompts(value: Any) -> tuple[tuple[Prompt, ...], bool]:
    """The prompts, and whether there may be several of them: strings, token ids, both mixed, or a list of those."""
    if isinstance(value, list) and any(isinstance(part, list | dict) for part in value):
        value, several = value, True
    elif isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        several = len(value) > 1
    else:
        value, several = [value], False
    if len(value) > MOST_PROMPTS:
        raise RequestError(f"prompt: {len(value)} of them; at most {MOST_PROMPTS}", param="prompt")
    return tuple(prompt_of(one, "prompt") for one in value), several


def prompt_of(value: Any, where: str) -> Prompt:
    """A string, token ids, or both by turns.

    Raises:
        RequestError: it is something else, or has images.
    """
    if isinstance(value, dict):
        if value.get("multimodal_data"):
            raise RequestError(f"{where}.multimodal_data: image input is not supported", param=where)
        value = value.get("prompt_string")
    if isinstance(value, str):
        return whole_text(value, where)
    if isinstance(value, list) and all(_part(part) for part in value):
        return tuple(value)
    raise RequestError(f"{where}: a string, or a list of token ids and strings, is needed", param=where)


def _part(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= COUNT)


def _bias(value: Any) -> tuple[dict[int, float], dict[str, float]]:
    """What is added to logits by token, and by text; false forbids."""
    pairs = list(value.items()) if isinstance(value, dict) else value or []
    if not isinstance(pairs, list) or not all(isinstance(p, list | tuple) and len(p) == 2 for p in pairs):
        raise RequestError("logit_bias: a list of pairs, or an object, is needed", param="logit_bias")
    by_token: dict[int, float] = {}
    by_text: dict[str, float] = {}
    if len(pairs) > MOST_BIASED:
        raise RequestError(f"logit_bias: {len(pairs)} of them; at most {MOST_BIASED}", param="logit_bias")
    for name, add in pairs:
        bias = -LARGE if add is False else float(number("logit_bias", add, (float, -LARGE, LARGE)))
        if isinstance(name, str) and not name.isdecimal():
            by_text[whole_text(name, "logit_bias")] = bias
        elif isinstance(name, str) or _part(name):
            by_token[number("logit_bias", int(str(name)[:20]), (int, 0, COUNT))] = bias
        else:
            raise RequestError("logit_bias: a token id, or a text, is needed", param="logit_bias")
    return by_token, by_text


def _sampling(fields: Fields, default: Sampling) -> Sampling:
    """By OpenAI's and mlx-lm's fields, and llama.cpp's where it has other words; -1 is its word for none, or all."""
    given: dict[str, Any] = {}
    for name, theirs, bounds in (
        ("repetition_penalty", "repeat_penalty", (float, 0, LARGE)),
        ("repetition_context_size", "repeat_last_n", (int, -1, COUNT)),
    ):
        value = fields.number(theirs, bounds)
        if value is not None:
            given[name] = COUNT if value == -1 else value
    body = {name: fields.take(name) for name in Sampling.__dataclass_fields__ if name != "logit_bias"}
    for name in ("seed", "top_k"):
        if body[name] == -1:
            given[name], body[name] = None if name == "seed" else 0, None
    return replace(Fields(body).sampling(default), **given)


def _settings(ask: GenerationRequest, n_probs: int) -> dict[str, Any]:
    s = ask.sampling
    return {
        "n_predict": -1 if ask.max_tokens is None else ask.max_tokens,
        "seed": -1 if s.seed is None else s.seed,
        "temperature": s.temperature,
        "top_k": s.top_k,
        "top_p": s.top_p,
        "min_p": s.min_p,
        "xtc_probability": s.xtc_probability,
        "xtc_threshold": s.xtc_threshold,
        "repeat_penalty": s.repetition_penalty,
        "repeat_last_n": s.repetition_context_size,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "stop": list(ask.stop),
        "n_probs": n_probs,
        "grammar": ask.grammar,
    }
