"""The service behind all APIs: it turns requests into choices for the engine's thread, and its events into answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import mlx.nn as nn

from ..checkpoint.find_model import no_text
from ..checkpoint.positions import longest_context, position_limit
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.loader import load_model
from ..decode.media import media_reader
from ..decode.opening import options_for
from ..engine.session import Session
from ..engine.transport import Forecast
from ..errors import LinkError, OutcoreError, RequestError
from ..machine.allocator import note_held, peak_held
from ..modules.mlx_lm_tokenizer import set_chat_template
from ..options import LoadOptions
from ..packages import modules
from ..text import one_line
from . import requests
from .choice import AnswerChoice, as_request_error
from .engine_thread import EngineThread, too_many
from .events import Begun, Ended, Event, Finished, GenerationRequest, ModelCard, shutting_down
from .prompting import Prompt, Prompter, too_long
from .shelf import Offered, Shelf

# ``prompt`` accepts prompts of up to this many tokens even if the model's context is shorter.
COUNTED = 62_500

# mlx_lm.server's default limit of an answer.
MAX_TOKENS = 512


@dataclass(frozen=True)
class ServiceOptions:
    """How models are served.

    Attributes:
        max_tokens: limit of an answer whose request has none.
        most: limit of sequences that share a forward pass; ``most_waiting``: of choices that wait.
        keep_alive: seconds that a model stays loaded without requests; None: for ever.
        most_context: limit of a prompt and its answer together, in tokens; None: what the model was made for.
        draft_tokens: limit of proposed tokens for a forward pass; None: chosen while the model runs.
        secret: the API key, if any; cached prompts are found only by servers with the same key.
        remote_images: images that requests name by address are fetched.
    """

    load: LoadOptions = field(default_factory=LoadOptions)
    max_tokens: int = MAX_TOKENS
    most: int = 32
    most_waiting: int = 256
    keep_alive: float | None = None
    most_context: int | None = None
    draft_tokens: int | None = None
    secret: str | None = field(default=None, repr=False)
    remote_images: bool = False


class ModelService:
    """Answers requests with a shelf's models. Lists, cards and state never wait for the engine.

    Args:
        progress: called while a model is loaded, with the step, bytes done and bytes in all.
    """

    def __init__(
        self,
        shelf: Shelf,
        options: ServiceOptions | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.shelf, self.options = shelf, options or ServiceOptions()
        self._progress = progress
        self._prompters: dict[str, Prompter] = {}
        # A tokenizer may be used by one thread at a time; this one is not the engine's.
        self._reader = ThreadPoolExecutor(1, "outcore-prompts")
        self._closing = False
        self._unread = 0  # choices whose prompts are not tokenized yet
        if any(model.card.images for model in shelf.models.values()):
            for package in modules("parts").values():
                requests.OPAQUE.update(package.READERS)
        own = self.options
        self.engine = EngineThread(
            self._open, own.keep_alive, own.most_waiting,
            most=own.most, prefill_step=own.load.prefill_step_size, draft_tokens=own.draft_tokens,
        )  # fmt: skip

    async def answer(self, *requests: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of an answer as they come; closing the generator cancels it.

        Args:
            requests: one, or several that differ in their prompts; their choices are numbered consecutively.

        Raises:
            RequestError: with the HTTP ``status``: 400, 404 (no such model), 429 (too many wait; ``retry_after``), 500,
                or 503 (no memory, or shutting down).
        """
        model = self.shelf.named(requests[0].model)
        loop, queue = asyncio.get_running_loop(), asyncio.Queue[Event | Exception]()

        def tell(event: Event | Exception) -> None:
            with suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(queue.put_nowait, event)

        choices: list[AnswerChoice] = []
        for request in requests:
            prompt = await self._read(model, request, self._room(model))
            most, sampling = self._limit(model, prompt, request.max_tokens), request.sampling
            for n in range(request.choices):
                # Choices of one seed must differ.
                own = sampling if sampling.seed is None else replace(sampling, seed=sampling.seed + n)
                own_ask = replace(request, model=model.name, max_tokens=most, sampling=own)
                choices.append(AnswerChoice(len(choices), own_ask, prompt, tell))
        self.engine.submit(choices)
        begun, ended, first_at = list[Begun](), list[Ended](), 0.0
        try:
            while len(ended) < len(choices):
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event  # the answer fails as a whole
                if isinstance(event, Begun):
                    begun.append(event)
                    if len(begun) > 1:
                        continue
                    first_at = time.monotonic()
                elif isinstance(event, Ended):
                    ended.append(event)
                yield event
            prompts = begun[: len(requests)]
            yield Finished(
                sum(len(choice.prompt.tokens) for choice in choices[:: requests[0].choices]),
                sum(end.tokens for end in ended),
                sum(each.cached_tokens for each in prompts),
                sum(end.reasoning_tokens for end in ended),
                begun[0].queued_s,
                max(each.prompt_s for each in prompts),
                time.monotonic() - first_at,
                sum(choice.drafted for choice in choices),
                sum(choice.accepted for choice in choices),
                len(choices),
            )
        finally:
            self.engine.cancel(choices)

    async def prompt(self, request: GenerationRequest) -> Prompt:
        model = self.shelf.named(request.model)
        room = self._room(model)
        return await self._read(model, request, None if room is None else max(room, COUNTED))

    def models(self) -> Sequence[ModelCard]:
        return [self._card(model) for model in self.shelf.models.values()]

    def card(self, name: str) -> ModelCard:
        return self._card(self.shelf.named(name))

    async def load(self, name: str, keep_alive: float | None) -> ModelCard:
        model = self.shelf.named(name)
        try:
            await asyncio.wrap_future(self.engine.call(lambda: self.engine.keep(model.name, keep_alive)))
        except (RequestError, LinkError):
            raise
        except OutcoreError as e:
            raise as_request_error(e) from e
        return self._card(model)

    def state(self) -> Mapping[str, Any]:
        """``status`` (``ok``, ``loading`` or ``closing``), ``running`` and ``waiting`` choices, counters of each loaded
        model, and bytes that MLX holds."""
        engine, loaded = self.engine, self.engine.loaded
        return {
            "status": "closing" if self._closing else "loading" if engine.loading is not None else "ok",
            "running": engine.running,
            "waiting": engine.waiting,
            "models": {} if loaded is None else {loaded.name: loaded.counters},
            "memory_held_bytes": note_held(),
            "memory_peak_bytes": peak_held(),
        }

    @property
    def failure(self) -> Exception | None:
        return self.engine.failure

    @property
    def forecast(self) -> Forecast | None:
        """Predicted memory of the machines that share the model; None: one machine has it."""
        loaded = self.engine.loaded
        return loaded.session.transport.forecast if loaded is not None else None

    def close(self) -> None:
        self._closing = True
        self.engine.close()
        self._reader.shutdown(cancel_futures=True)

    def _room(self, model: Offered) -> int | None:
        given = self.options.most_context or longest_context(model.config)
        return min((n for n in (given, position_limit(model.config)) if n is not None), default=None)

    async def _read(self, model: Offered, request: GenerationRequest, most: int | None) -> Prompt:
        # The engine does not know of these yet, and any number of them may wait to be tokenized.
        waiting = self._unread + self.engine.waiting
        if waiting + self.engine.running + request.choices > self.options.most + self.options.most_waiting:
            raise too_many(waiting)
        self._unread += request.choices
        try:
            for package in modules("parts").values():
                await package.ready(request.messages or (), model.card.images, self.options.remote_images)
            return await asyncio.get_running_loop().run_in_executor(self._reader, self._prepare, model, request, most)
        except RequestError:
            raise
        except OutcoreError as e:
            raise RequestError(one_line(e), "internal_error", status=500) from e
        except RuntimeError as e:
            if not self._closing:
                raise
            raise shutting_down() from e
        finally:
            self._unread -= request.choices

    def _prepare(self, model: Offered, request: GenerationRequest, most: int | None) -> Prompt:
        if model.name not in self._prompters:
            if why := no_text(model.folder):
                raise RequestError(f"{model.name} {why}", "unsupported_model", param="model")
            options: dict[str, Any] = {"trust_remote_code": True} if self.options.load.trust_remote_code else {}
            if model.template is not None:
                options["chat_template"] = model.template  # mlx-lm chooses the tool parser by it
            tokenizer = load_tokenizer(model.folder, options, eos=model.config.get("eos_token_id"))
            if model.template is not None:
                set_chat_template(tokenizer, model.template)
            vocabulary = model.config.get("vocab_size") or (model.config.get("text_config") or {}).get("vocab_size")
            config = model.config | (options_for(model.folder, self.options.load).model_config or {})
            find = partial(media_reader, model.folder, config, self.options.load.ranks)
            self._prompters[model.name] = Prompter(tokenizer, vocabulary if isinstance(vocabulary, int) else None, find)
        return self._prompters[model.name].prepare(request, most)

    def _limit(self, model: Offered, prompt: Prompt, max_tokens: int | None) -> int:
        positions, tokens = self._room(model), len(prompt.tokens)
        if positions is not None and tokens > positions:
            raise too_long(f"the prompt has {tokens} tokens", tokens, positions)
        limit = self.options.max_tokens if max_tokens is None else max_tokens
        # The last token needs no position.
        return limit if positions is None else min(limit, positions - tokens + 1)

    def _open(self, name: str) -> nn.Module:
        folder = self.shelf.models[name].folder
        model, _ = load_model(folder, options_for(folder, self.options.load), progress=self._progress)
        session: Session = model.outcore
        if session.prefix is not None and self.options.secret is not None:
            session.prefix.salt(self.options.secret)
        return model

    def _card(self, model: Offered) -> ModelCard:
        loaded = self.engine.loaded
        if loaded is None or loaded.name != model.name:
            return model.card
        left_s, memory_bytes = loaded.left_s, loaded.session.plan.peak_bytes
        expires_at = None if left_s is None else time.time() + left_s
        return replace(model.card, loaded=True, memory_bytes=memory_bytes, expires_at=expires_at)
