"""The thread that loads, runs and unloads models, since MLX's streams belong to threads.

Choices start in the order of their requests. One for another model waits until all choices before it have ended, and
those after it wait behind it. An error fails the choices that it concerns, not the thread. A model that ranks share
stays loaded, and an error that its ranks cannot recover from ends the thread. A step is interrupted when no client
waits for any of its choices, or the server shuts down.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decode.scheduler import Scheduler
from ..decode.step import StepResult
from ..errors import OutcoreError, RequestError
from ..machine.allocator import clear_cache
from ..machine.exclusive import asking, join
from ..monitoring import publish
from ..text import one_line
from .choice import AnswerChoice, as_request_error, request_of
from .events import RETRY_S, Begun, Ended, Event, shutting_down
from .shelf import Loaded

log = logging.getLogger("outcore.serve")

# Seconds between checks that the other ranks are alive, while the model is idle.
LOOK_S = 0.5


class EngineThread:
    """The engine's thread and its queue of choices.

    Args:
        open_model: loads a model by name.
        keep_alive: seconds that a model stays loaded without requests; None: for ever.
        most_waiting: limit of choices that wait.
        options: arguments of the scheduler.

    Attributes:
        loaded: the model in memory; other threads read it without a lock.
        loading: name of the model that is being loaded.
        failure: the error of the ranks that ended the thread.
    """

    def __init__(
        self, open_model: Callable[[str], nn.Module], keep_alive: float | None, most_waiting: int, **options: Any
    ) -> None:
        self.open, self._keep_alive, self._most_waiting, self._options = open_model, keep_alive, most_waiting, options
        self.loaded: Loaded | None = None
        self.loading: str | None = None
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._choices: dict[int, AnswerChoice] = {}  # not yet ended, in the order of submission
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outcore-engine", daemon=True)
        self._thread.start()

    # From any thread

    @property
    def running(self) -> int:
        loaded = self.loaded
        return loaded.sequences.running if loaded is not None else 0

    @property
    def waiting(self) -> int:
        return max(0, len(self._choices) - self.running)

    def submit(self, choices: Sequence[AnswerChoice]) -> None:
        """Queue choices. Raises RequestError if too many wait (429) or the server shuts down (503)."""
        with self._lock:
            if self._closing:
                raise shutting_down()
            if self.waiting + len(choices) > self._most_waiting:
                raise too_many(self.waiting)
            self._choices |= {choice.uid: choice for choice in choices}
        self._inbox.put(int)

    def cancel(self, choices: Sequence[AnswerChoice]) -> None:
        for choice in choices:
            choice.wanted = False
        self._inbox.put(int)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run ``work`` on the engine's thread, between steps."""
        future: Future[Any] = Future()

        def do() -> None:
            if not future.set_running_or_notify_cancel():
                return  # its caller is gone
            try:
                if self._closing:
                    raise shutting_down()
                future.set_result(work())
            except Exception as e:
                future.set_exception(e)

        with self._lock:
            if not self._closing:
                self._inbox.put(do)
                return future
        do()
        return future

    def close(self) -> None:
        """Fail all choices, close the model and end the thread. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._inbox.put(int)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            join(self._thread)

    # On the engine's thread

    def keep(self, name: str, keep_alive: float | None) -> None:
        """Load a model, or unload it if it is idle and ``keep_alive`` is 0; to be run by ``call``.

        Raises:
            RequestError: another model is answering, or several machines share this one.
        """
        if keep_alive == 0:
            if self.loaded is not None and self.loaded.leader is not None:
                raise RequestError("the model cannot be unloaded: several machines share it", "not_supported")
            if self.loaded is not None and self.loaded.name == name and self.loaded.idle_at is not None:
                self.drop()
            return
        loaded = self.loaded
        if loaded is None or loaded.name != name:
            if loaded is not None and self._choices:
                why = f"{loaded.name} is answering; try again later"
                raise RequestError(why, "busy", status=503, retry_after=RETRY_S)
            loaded = None  # its memory must be free before the next is loaded
            loaded = self._switch(name)
        loaded.load_s, loaded.keep_s = 0.0, self._keep_alive if keep_alive is None else keep_alive
        if loaded.idle_at is not None:
            loaded.idle_at = time.monotonic()

    def _switch(self, name: str) -> Loaded:
        self.drop()
        self.loading, began = name, time.monotonic()
        try:
            model = self.open(name)
        finally:
            self.loading = None
        publish(model, "serve", name)
        own = Scheduler(model, **self._options)
        sequences = model.outcore.transport.leader(own) or own
        self.loaded = Loaded(name, model, sequences, self._keep_alive, time.monotonic() - began)
        return self.loaded

    def drop(self) -> None:
        if self.loaded is None:
            return
        loaded, self.loaded = self.loaded, None
        for close in (loaded.sequences.close, loaded.busy.close, loaded.session.close):
            try:
                close()
            except Exception:
                log.exception("%s cannot be closed", loaded.name)
        # Frees reference cycles, which would stay in memory next to the next model.
        del loaded, close
        gc.collect()
        clear_cache()

    def _run(self) -> None:
        try:
            while not self._closing:
                try:
                    self._listen()
                    self._work()
                except _Unwanted:
                    continue
                except Exception as e:
                    if self._ends_with(e):
                        break
                    log.exception("the engine failed")
                    self._fail_all(e)
        finally:
            with self._lock:
                self._closing = True
            self._take_in()
            self._fail_all(shutting_down())
            # Work left on an ended thread's streams may count as unfinished for ever; near its memory limit MLX would
            # wait for it.
            with contextlib.suppress(RuntimeError):
                with mx.stream(generation_stream):
                    mx.synchronize()
                mx.synchronize()

    def _ends_with(self, error: Exception) -> bool:
        if self.loaded is None or (leader := self.loaded.leader) is None:
            return False
        leader.fail(one_line(error))
        log.error("all machines end: %s", one_line(error), exc_info=not isinstance(error, OutcoreError))
        self.failure = error
        self._fail_all(error)
        return True

    def _listen(self) -> None:
        """Receive new work, waiting for it if there is no choice; drop cancelled choices and an expired model."""
        if self._choices:
            self._take_in()
        elif self.loaded is None:
            self._take_in(None)
        else:
            self.loaded.rest()
            self._take_in(self.loaded.left_s if self.loaded.leader is None else LOOK_S)
        self._remove([choice for choice in list(self._choices.values()) if not choice.wanted])
        if self.loaded is not None and self.loaded.left_s == 0 and not self._choices:
            self.drop()

    def _take_in(self, wait_s: float | None = 0) -> None:
        with contextlib.suppress(queue.Empty):
            work = self._inbox.get_nowait() if wait_s == 0 else self._inbox.get(timeout=wait_s)
            while True:
                work()
                work = self._inbox.get_nowait()

    def _work(self) -> None:
        live = list(self._choices.values())
        pending, there = [choice for choice in live if not choice.started], self.loaded and self.loaded.name
        if live and len(pending) == len(live) and there != (name := pending[0].request.model):
            try:
                self._switch(name)
            except Exception as e:
                log.warning("%s cannot be loaded: %s", name, one_line(e))
                self._fail([choice for choice in pending if choice.request.model == name], e)
                return
        if (loaded := self.loaded) is None:
            return
        for choice in itertools.takewhile(lambda choice: choice.request.model == loaded.name, pending):
            try:
                request = request_of(choice.uid, choice.prompt, choice.request)
            except Exception as e:
                self._fail([choice], e)
                continue
            loaded.wake()
            choice.started = True
            loaded.sequences.ends = choice.prompt.tokenizer.eos_token_ids
            loaded.sequences.add(request)
        if not any(choice.started for choice in live):
            return
        # With several ranks a step cannot be interrupted: each of them must finish it.
        with asking(self._look if loaded.leader is None else lambda: None):
            step = loaded.sequences.step()
        self._tell(loaded, step)

    def _look(self) -> None:
        """Interrupt the step (raise ``_Unwanted``) if no client waits for it or the server shuts down."""
        if self._closing or not any(choice.wanted and choice.started for choice in list(self._choices.values())):
            raise _Unwanted

    def _tell(self, loaded: Loaded, step: StepResult) -> None:
        now, choices = time.monotonic(), self._choices
        for uid, prompt_s in step.joined.items():
            choice, load_s, loaded.load_s = choices[uid], loaded.load_s, 0.0
            queued_s, tokens = now - prompt_s - choice.asked_at, len(choice.prompt.tokens)
            choice.tell(Begun(loaded.name, tokens, step.found.get(uid, 0), load_s, queued_s, prompt_s))
        for uid, (drafted, accepted) in step.drafts.items():
            choices[uid].drafted += drafted
            choices[uid].accepted += accepted
        over: dict[AnswerChoice, Ended | Exception] = {}
        for token in step.tokens:
            loaded.tokens += 1
            try:
                _send(choices[token.uid], choices[token.uid].add(token), over)
            except Exception as e:  # a model may have more tokens than its tokenizer can decode
                over[choices[token.uid]] = e
        for uid in step.full:
            log.warning("an answer ended early: no memory for a longer context")
            _send(choices[uid], choices[uid].end("length"), over)
        # Before the end is reported, so that a client that has its answer no longer sees it running.
        self._remove(over)
        for choice, end in over.items():
            if isinstance(end, Ended) and choice.request.keep_alive is not None:
                loaded.keep_s = choice.request.keep_alive
            choice.tell(end if isinstance(end, Ended) else as_request_error(end))
        concerned = Counter(id(error) for _, error in step.failed)
        for uid, error in step.failed:
            # An error of several choices is not about one prompt's length.
            self._fail([choices[uid]], error, concerned[id(error)] == 1)
        step.failed.clear()

    def _remove(self, choices: Collection[AnswerChoice]) -> None:
        started = [choice.uid for choice in choices if choice.started]
        if started and self.loaded is not None:
            self.loaded.sequences.remove(started)
        with self._lock:
            for choice in choices:
                self._choices.pop(choice.uid, None)

    def _fail(self, choices: Collection[AnswerChoice], error: Exception, alone: bool = False) -> None:
        """End choices with an error; ``alone``: the error is about one choice's prompt."""
        self._remove(choices)
        for choice in choices:
            choice.tell(as_request_error(error, choice if alone else None))

    def _fail_all(self, error: Exception) -> None:
        """End all choices with an error and unload the model, whose state is unknown; new choices are not affected."""
        with self._lock:
            live, self._choices = list(self._choices.values()), {}
        for choice in live:
            choice.tell(as_request_error(error))
        self.drop()


def _send(choice: AnswerChoice, events: Sequence[Event], over: dict[AnswerChoice, Ended | Exception]) -> None:
    for event in events:
        if isinstance(event, Ended):
            over[choice] = event
        else:
            choice.tell(event)


class _Unwanted(BaseException):
    """No client waits for the step that this interrupts."""


def too_many(waiting: int) -> RequestError:
    why = f"{waiting} requests are waiting already; try again later"
    return RequestError(why, "too_many_requests", status=429, retry_after=RETRY_S)
