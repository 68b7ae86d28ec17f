"""What the APIs are answered by: requests become jobs of the engine, and what it says of them becomes events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import mlx.nn as nn

from ..checkpoint.lazy_model import longest_context
from ..checkpoint.tokenizer import load_tokenizer
from ..decode.speculative.drafting import check_draft_length
from ..engine.session import Session
from ..engine.transport import Forecast
from ..errors import LinkError, OutcoreError, RequestError
from ..loading.loader import load_model
from ..machine.allocator import note_held, peak_held
from ..modules.mlx_lm_compat import set_chat_template
from ..options import LoadOptions, whole
from ..text import one_line
from .choice import ChoiceFinished, ChoiceJob, ChoiceStarted, Out, TokenEvent
from .engine_thread import RETRY_S, EngineThread
from .events import (
    Begun,
    Called,
    Ended,
    Event,
    Finished,
    GenerationRequest,
    ModelCard,
    Sampling,
    TextPart,
    TokenLogprob,
)
from .prompting import Prompt, Prompter
from .shelf import Offered, Shelf
from .token_text import TokenTexts

COUNTED = 62_500
"""Tokens that are counted, for whoever wants to know how many there are, in a context that has fewer."""

MAX_TOKENS = 512
"""Of an answer, where nobody says; mlx_lm.server's number."""


@dataclass(frozen=True)
class ServiceOptions:
    """How models are served.

    Attributes:
        load: how each is loaded.
        max_tokens: of an answer, where a request does not say.
        most: sequences that share sweeps at most. ``most_waiting``: choices that may wait.
        keep_alive: seconds that a model stays loaded when nobody asks for it; None: for good.
        most_context: tokens of a prompt and its answer together, where the model has positions for them; None: as many
            as it was made for.
        draft_tokens: drafted for a sweep at most; None: as many as are worth it.
        tokenizer: further arguments of mlx-lm's tokenizer.
        secret: what clients have to know, if anything: prompts are kept for those alone who do.
    """

    load: LoadOptions = field(default_factory=LoadOptions)
    max_tokens: int = MAX_TOKENS
    most: int = 32
    most_waiting: int = 256
    keep_alive: float | None = None
    most_context: int | None = None
    draft_tokens: int | None = None
    tokenizer: Mapping[str, Any] = field(default_factory=dict)
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("max_tokens", "most", "most_waiting"):
            whole(self.load.name(name), getattr(self, name))
        if self.draft_tokens is not None:
            check_draft_length(self.draft_tokens, self.load.name("num_draft_tokens"))


@dataclass
class _Known:
    """A model's tokenizer, and what is made of it."""

    prompter: Prompter
    texts: TokenTexts


class ModelService:
    """Answers by the models of a shelf: an ``exchange.Service``.

    Args:
        progress: called with what is being done while a model is loaded, bytes done and bytes in all.
    """

    def __init__(
        self,
        shelf: Shelf,
        options: ServiceOptions | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        self.shelf, self.options = shelf, options or ServiceOptions()
        self._progress = progress
        self._known: dict[str, _Known] = {}
        # Tokenizers are used by one thread at a time, which is not the engine's.
        self._reader = ThreadPoolExecutor(1, "outcore-prompts")
        self._closing = False
        self._arrived = 0  # choices whose prompts are being read, or wait for that
        self.engine = EngineThread(
            self._open,
            most=self.options.most,
            prefill_step=self.options.load.prefill_step_size,
            draft_tokens=self.options.draft_tokens,
            keep_alive=self.options.keep_alive,
            most_waiting=self.options.most_waiting,
        )
        self.engine.start()

    # exchange.Service

    async def answer(self, ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        """The events of an answer, as they come."""
        model = self.shelf.named(ask.model)
        prompt = await self._read(model, ask, most=self._room(model))
        limit = self._limit(model, len(prompt.tokens), ask.max_tokens)
        answer = _Answer(prompt, model.name, ask.choices)
        known = self._known[model.name]
        jobs = [
            ChoiceJob(
                model.name,
                known.prompter.tokenizer,
                known.texts,
                prompt.tokens,
                answer.teller(choice),
                limit,
                _sampling(ask, choice),
                prompt.stop,
                prompt.grammar,
                ask.logprobs,
                ask.keep_alive,
                prompt.shared,
            )
            for choice in range(ask.choices)
        ]
        self.engine.submit(jobs)
        try:
            async for event in answer.events(lambda choice: self.engine.cancel([jobs[choice]])):
                if isinstance(event, Finished):
                    drafted, accepted = sum(job.drafted for job in jobs), sum(job.accepted for job in jobs)
                    event = replace(event, drafted=drafted, accepted=accepted)
                yield event
        finally:
            self.engine.cancel(jobs)

    async def count(self, ask: GenerationRequest) -> int:
        """Tokens of the prompt."""
        model = self.shelf.named(ask.model)
        return len((await self._read(model, ask, most=self._counted(model))).tokens)

    def models(self) -> Sequence[ModelCard]:
        """All that can be asked for."""
        return [self._card(model) for model in self.shelf.models.values()]

    def card(self, name: str) -> ModelCard:
        """One of them."""
        return self._card(self.shelf.named(name))

    async def load(self, name: str, keep_alive: float | None) -> ModelCard:
        """Have a model in memory; ``keep_alive`` 0: unload it."""
        model = self.shelf.named(name)
        if keep_alive == 0:
            await self._call(lambda: self.engine.unload(model.name))
        else:
            await self._call(lambda: self.engine.load(model.name, keep_alive))
        return self._card(model)

    def state(self) -> Mapping[str, Any]:
        """What the engine does now."""
        engine, loaded = self.engine, self.engine.loaded
        status = "closing" if self._closing else "loading" if engine.loading is not None else "ok"
        models: dict[str, Any] = {}
        for name in [*engine.before, *([loaded.name] if loaded is not None else [])]:
            plan = loaded.session.plan if loaded is not None and loaded.name == name else None
            memory = {"memory_bytes": 0} if plan is None else {
                "memory_bytes": plan.peak_bytes, "budget_bytes": plan.budget_bytes
            }  # fmt: skip
            models[name] = engine.counters(name, loaded) | memory
        return {
            "status": status,
            "running": engine.running,
            "waiting": engine.waiting,
            "most": self.options.most,
            "models": models,
            "memory_held_bytes": note_held(),
            "memory_peak_bytes": peak_held(),
        }

    @property
    def failure(self) -> Exception | None:
        """What the server has to end with, because no rank of several can go on; None: nothing."""
        return self.engine.failure

    @property
    def forecast(self) -> Forecast | None:
        """What the machines that share the model are predicted to take; None: it is one machine's."""
        loaded = self.engine.loaded
        return loaded.session.transport.forecast if loaded is not None else None

    def close(self, wait_s: float | None = None) -> None:
        """End what is under way, and close the model."""
        self._closing = True
        self.engine.close(wait_s)
        self._reader.shutdown(wait=wait_s is None, cancel_futures=True)

    # How

    def _room(self, model: Offered) -> int | None:
        """Tokens of a prompt and its answer together at most; None: any number."""
        given = self.options.most_context or longest_context(model.config)
        return min((n for n in (given, model.positions) if n is not None), default=None)

    def _counted(self, model: Offered) -> int | None:
        """The same where they are only counted."""
        room = self._room(model)
        return None if room is None else max(room, COUNTED)

    async def _read(self, model: Offered, ask: GenerationRequest, most: int | None = None) -> Prompt:
        # Whoever comes is counted here: there may be no end of those whose prompts are not even read.
        waiting = self._arrived + self.engine.waiting
        if waiting + self.engine.running + ask.choices > self.options.most + self.options.most_waiting:
            why = f"{waiting} requests wait already; try again later"
            raise RequestError(why, "too_many_requests", status=429, retry_after=RETRY_S)
        loop = asyncio.get_running_loop()
        self._arrived += ask.choices
        try:
            return await loop.run_in_executor(self._reader, self._prepare, model, ask, most)
        except RequestError:
            raise
        except OutcoreError as e:
            raise RequestError(one_line(e), "internal_error", status=500) from e
        except RuntimeError as e:
            if not self._closing:
                raise
            raise RequestError("the server is shutting down", "shutting_down", status=503) from e
        finally:
            self._arrived -= ask.choices

    def _prepare(self, model: Offered, ask: GenerationRequest, most: int | None = None) -> Prompt:
        """On the prompts' thread."""
        if model.name not in self._known:
            options = dict(self.options.tokenizer)
            if self.options.load.trust_remote_code:
                options["trust_remote_code"] = True
            if model.template is not None:
                options["chat_template"] = model.template  # by which mlx-lm knows how calls of tools are written
            tokenizer = load_tokenizer(model.folder, options, eos=model.config.get("eos_token_id"))
            if model.template is not None:
                set_chat_template(tokenizer, model.template)
            self._known[model.name] = _Known(Prompter(tokenizer, _vocabulary(model.config)), TokenTexts(tokenizer))
        return self._known[model.name].prompter.prepare(ask, most)

    def _limit(self, model: Offered, prompt: int, asked: int | None) -> int:
        positions = self._room(model)
        if positions is not None and prompt > positions:
            raise RequestError(
                f"the prompt has {prompt} tokens; this model's context is {positions}: shorten it",
                "context_length_exceeded",
                counts={"n_prompt_tokens": prompt, "n_ctx": positions},
            )
        limit = self.options.max_tokens if asked is None else asked
        # The last token is not computed.
        return limit if positions is None else min(limit, positions - prompt + 1)

    def _open(self, name: str) -> nn.Module:
        """On the engine's thread."""
        model, _ = load_model(self.shelf.models[name].folder, self.options.load, progress=self._progress)
        session: Session = model.outcore
        if session.prefix is not None and self.options.secret is not None:
            session.prefix.salt(self.options.secret)
        return model

    async def _call(self, work: Callable[[], Any]) -> Any:
        loop, future = asyncio.get_running_loop(), asyncio.get_running_loop().create_future()

        def settle(result: Any) -> None:
            if future.done():
                return
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)

        def done(result: Any) -> None:
            with suppress(RuntimeError):  # nobody is there any more
                loop.call_soon_threadsafe(settle, result)

        self.engine.call(work, done)
        try:
            return await future
        except (RequestError, LinkError):
            raise
        except OutcoreError as e:
            raise RequestError(one_line(e), "insufficient_memory", status=503) from e

    def _card(self, model: Offered) -> ModelCard:
        loaded = self.engine.loaded
        if loaded is None or loaded.name != model.name:
            return model.card
        left = None if loaded.until is None else loaded.until - time.monotonic()
        return replace(
            model.card,
            loaded=True,
            memory_bytes=loaded.session.plan.peak_bytes,
            expires_at=None if left is None else time.time() + max(0.0, left),
        )


class _Answer:
    """Makes events of what the engine tells of the choices of one request. To be made within the event loop."""

    def __init__(self, prompt: Prompt, model: str, choices: int) -> None:
        self._prompt, self._model = prompt, model
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Out]] = asyncio.Queue()
        self._choices = [_Choice(i, prompt) for i in range(choices)]

    def teller(self, choice: int) -> Callable[[Out], None]:
        """What the engine calls, on its thread."""

        def tell(out: Out) -> None:
            with suppress(RuntimeError):  # the loop has ended, and nobody is there
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (choice, out))

        return tell

    async def events(self, enough: Callable[[int], None]) -> AsyncGenerator[Event, None]:
        """All of them.

        Args:
            enough: called with a choice that has ended before the engine ended it.

        Raises:
            RequestError: of a choice; the others are of no use then.
        """
        begun: ChoiceStarted | None = None
        first = time.monotonic()
        while not all(choice.over for choice in self._choices):
            index, out = await self._queue.get()
            if isinstance(out, Exception):
                raise out
            if isinstance(out, ChoiceStarted):
                if begun is None:
                    begun, first = out, time.monotonic()
                    tokens = len(self._prompt.tokens)
                    yield Begun(self._model, tokens, out.found, load_s=out.load_s)
                continue
            choice = self._choices[index]
            if choice.over:
                continue
            for event in choice.heard(out):
                yield event
            if choice.over and isinstance(out, TokenEvent):
                enough(index)
        yield Finished(
            len(self._prompt.tokens),
            sum(choice.tokens for choice in self._choices),
            reasoning_tokens=sum(choice.reasoning_tokens for choice in self._choices),
            cached_tokens=begun.found if begun is not None else 0,
            queued_s=begun.queued_s if begun is not None else 0.0,
            prompt_s=begun.prompt_s if begun is not None else 0.0,
            generation_s=time.monotonic() - first,
            choices=len(self._choices),
        )


class _Choice:
    """One choice's text, as it is read."""

    def __init__(self, index: int, prompt: Prompt) -> None:
        self.index, self.over = index, False
        self.tokens = self.reasoning_tokens = 0
        self._parser = prompt.parser(index)
        self._called = False
        self._logprobs: list[TokenLogprob] = []

    def heard(self, out: TokenEvent | ChoiceFinished) -> list[Event]:
        """The events of what the engine tells."""
        if isinstance(out, TokenEvent):
            self.tokens += 1
            self.reasoning_tokens += self._parser.thinking
            if out.logprob is not None:
                self._logprobs.append(out.logprob)
            events = self._with_logprobs(self._parser.feed(out.text))
            return [*events, *self._end("stop", None)] if self._parser.over else events
        events = self._with_logprobs([*self._parser.feed(out.text), *self._parser.finish(out.reason == "length")])
        return [*events, *self._end(out.reason, out.stop)]

    def _end(self, reason: Literal["stop", "length"], stop: str | None) -> list[Event]:
        rest = [TextPart(self.index, logprobs=tuple(self._logprobs))] if self._logprobs else []
        self.over = True
        called = self._called and reason == "stop" and stop is None
        ended = Ended(self.index, "tool_calls" if called else reason, self.tokens, self.reasoning_tokens, stop)
        return [*rest, ended]

    def _with_logprobs(self, pieces: Sequence[TextPart | Called]) -> list[Event]:
        found: list[Event] = []
        for piece in pieces:
            self._called |= isinstance(piece, Called)
            if isinstance(piece, TextPart) and self._logprobs:
                piece = replace(piece, logprobs=tuple(self._logprobs))
                self._logprobs = []
            found.append(piece)
        return found


def _sampling(ask: GenerationRequest, choice: int) -> Sampling:
    """Of one choice; those of one seed are not to be the same."""
    sampling = ask.sampling
    return sampling if sampling.seed is None or choice == 0 else replace(sampling, seed=sampling.seed + choice)


def _vocabulary(config: Mapping[str, Any]) -> int | None:
    """Tokens that a model has embeddings for, if its configuration says so."""
    found = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
    return found if isinstance(found, int) else None
