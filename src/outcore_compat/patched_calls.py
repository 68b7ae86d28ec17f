"""The replacements of mlx-lm's functions. Each calls mlx-lm's own for a model that Outcore has not loaded."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx_lm.generate import BatchGenerator, BatchResponse, GenerationResponse
from mlx_lm.generate import batch_generate as their_batch_generate
from mlx_lm.generate import generate as their_generate
from mlx_lm.generate import stream_generate as their_stream_generate
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.utils import load as their_load

from outcore.checkpoint.find_model import resolve_model
from outcore.decode import batch, loader
from outcore.decode import generate as generation
from outcore.decode.prompt import encode
from outcore.engine.session import Session
from outcore.errors import UsageError
from outcore.machine.random_state import set_random_state
from outcore.options import LoadOptions

from .settings import PatchSettings, current_settings

log = logging.getLogger("outcore.integrations")


@functools.wraps(their_load)
def load(*args: Any, **kwargs: Any) -> Any:
    settings = current_settings()
    if settings is None:
        return their_load(*args, **kwargs)
    asked = _arguments(their_load, args, kwargs)
    names = ("model_config", "adapter_path", "lazy", "trust_remote_code")
    options = replace(settings.options, **{name: asked[name] for name in names})
    folder = resolve_model(str(asked["path_or_hf_repo"]), asked["revision"])
    found = load_by(settings, folder, options, lambda f, o: loader.load_with_tokenizer(f, o, asked["tokenizer_config"]))
    # mlx-lm's modules draw their first weights at random. A program that sets a seed and loads then continues alike.
    set_random_state(found[0].outcore.profile.lazy.random_after)
    return found if asked["return_config"] else found[:2]


def _arguments(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call by name, with defaults."""
    bound = inspect.signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def load_by(
    settings: PatchSettings,
    folder: Path,
    options: LoadOptions,
    load: Callable[[Path, LoadOptions], tuple[Any, ...]],
) -> tuple[Any, ...]:
    """Loads a model within the budget that these settings' models share. Returns the tuple that ``load`` returns, with
    the model first."""
    found = settings.budget.load(folder, options, lambda o: load(folder, o))
    session: Session = found[0].outcore
    log.info("%s: %r", folder.name, session)
    return found


@functools.wraps(their_stream_generate)
def stream_generate(
    model: nn.Module, tokenizer: Any, prompt: Any, max_tokens: int = 256, *args: Any, **kwargs: Any
) -> Iterator[GenerationResponse]:
    session: Session | None = getattr(model, "outcore", None)
    if session is None:
        return their_stream_generate(model, tokenizer, prompt, max_tokens, *args, **kwargs)
    kwargs |= dict(zip(("draft_model", "stream"), args, strict=False))
    return _stream(model, tokenizer, prompt, max_tokens, kwargs)


def _stream(
    model: nn.Module, tokenizer: Any, prompt: Any, max_tokens: int, kwargs: dict[str, Any]
) -> Iterator[GenerationResponse]:
    wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    ids = encode(wrapper, prompt)
    with _prepared(model, kwargs) as given:
        yield from generation.stream_generate(model, wrapper, ids, max_tokens, **given)


@functools.wraps(their_generate)
def generate(model: nn.Module, tokenizer: Any, prompt: Any, verbose: bool = False, **kwargs: Any) -> str:
    session: Session | None = getattr(model, "outcore", None)
    if session is None:
        text: str = their_generate(model, tokenizer, prompt, verbose, **kwargs)
        return text
    wrapper = tokenizer if isinstance(tokenizer, TokenizerWrapper) else TokenizerWrapper(tokenizer)
    ids, max_tokens = encode(wrapper, prompt), kwargs.pop("max_tokens", 256)
    with _prepared(model, kwargs) as given:
        return generation.generate(model, wrapper, ids, verbose, max_tokens=max_tokens, **given)


@contextmanager
def _prepared(model: nn.Module, kwargs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields the arguments as Outcore's functions take them."""
    settings = current_settings()
    given = (dict(settings.generation) if settings is not None else {}) | dict(kwargs)
    given.pop("stream", None)  # it is the thread's
    if given.get("draft_model") is None:
        # As in mlx-lm, num_draft_tokens has no effect without a draft model.
        given.pop("draft_model", None)
        given.pop("num_draft_tokens", None)
    caches: list[Any] | None = given.get("prompt_cache")
    count = len(make_prompt_cache(model)) if caches is not None and "draft_model" in given else None
    if caches is not None and count is not None and len(caches) > count:
        # The caches after the model's are the draft model's, which has its own here.
        given["prompt_cache"] = caches[:count]
    try:
        yield given
    finally:
        if caches is not None:
            caches[:count] = given["prompt_cache"]  # they may have been quantized


@functools.wraps(their_batch_generate)
def batch_generate(model: nn.Module, *args: Any, **kwargs: Any) -> BatchResponse:
    session: Session | None = getattr(model, "outcore", None)
    if session is None:
        return their_batch_generate(model, *args, **kwargs)
    asked = _arguments(their_batch_generate, (model, *args), kwargs)
    more = asked.pop("kwargs")
    if more.pop("max_kv_size", None) is not None:
        raise UsageError("max_kv_size: sequences of a batch keep all their tokens; leave it out")
    # The plan sets how many prompts are computed at once, and the stream is the thread's.
    more = {name: value for name, value in more.items() if name not in ("prefill_batch_size", "stream")}
    return batch.batch_generate(**asked, **more)


class RefusingBatchGenerator(BatchGenerator):
    """mlx-lm's class, for its own models only: a streamed one would take more memory than is planned."""

    def __new__(cls, model: nn.Module, **_: Any) -> RefusingBatchGenerator:
        if getattr(model, "outcore", None) is not None:
            raise UsageError("BatchGenerator: cannot run a streamed model; use batch_generate, or outcore serve")
        return super().__new__(cls)


# mlx-lm's names, and their replacements.
PAIRS: tuple[tuple[Any, Any], ...] = (
    (their_load, load),
    (their_stream_generate, stream_generate),
    (their_generate, generate),
    (their_batch_generate, batch_generate),
    (BatchGenerator, RefusingBatchGenerator),
)
