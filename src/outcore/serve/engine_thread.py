"""The thread that computes. MLX's streams belong to threads: this one loads models, runs them and lets them go.

What it is to do comes through a queue. Jobs are taken in the order in which they came, and are told what becomes of
them; a job for another model than the one that is loaded waits until all before it have ended, and those after it wait
behind it. An error fails the jobs that it concerns, never the thread. Of a model that ranks share the first rank has
the engine: it stays loaded, and an error that no rank can go on after ends the thread on purpose. Between two parts of
a step it looks whether that is wanted still: where nobody does any more, or the server ends, it is broken off.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decode.step import StepResult
from ..errors import OutcoreError, RequestError
from ..machine.held_signals import asking, join
from ..text import one_line
from .choice import ChoiceJob, Writer, as_request_error, request_of
from .events import RETRY_S, Begun, Ended, Event, shutting_down
from .model_slot import Loaded, ModelSlot

log = logging.getLogger("outcore.serve")

LOOK_S = 0.5
"""Seconds after which it looks whether the ranks that share the model are still there, when nobody asks."""


class EngineThread:
    """Runs jobs, from when it is made.

    Args:
        open_model: loads a model by its name.
        keep_alive: seconds that a model stays loaded when nobody asks for it; None: for good.
        most_waiting: jobs that may wait.
        options: of ``Continuous``.

    Attributes:
        slot: the model that is in memory; read from other threads, never waited for.
        failure: what no rank of several can go on after; the thread has ended.
    """

    def __init__(
        self, open_model: Callable[[str], nn.Module], keep_alive: float | None, most_waiting: int, **options: Any
    ) -> None:
        self.slot = ModelSlot(open_model, keep_alive, **options)
        self._most_waiting = most_waiting
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._pending: deque[ChoiceJob] = deque()
        self._uids = itertools.count()
        self._jobs: set[ChoiceJob] = set()  # submitted, and not over
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outcore-engine", daemon=True)
        self._thread.start()

    # From any thread

    @property
    def running(self) -> int:
        """Choices that are being written; ``waiting``: that wait."""
        loaded = self.slot.loaded
        return loaded.sequences.running if loaded is not None else 0

    @property
    def waiting(self) -> int:
        return max(0, len(self._jobs) - self.running)

    def submit(self, jobs: Sequence[ChoiceJob]) -> None:
        """Have these answered.

        Raises:
            RequestError: too many wait already (429), or the server ends (503).
        """
        with self._lock:
            if self._closing:
                raise shutting_down()
            if self.waiting + len(jobs) > self._most_waiting:
                raise too_many(self.waiting)
            self._jobs.update(jobs)
            # With the lock held: what is in when the thread ends is told so.
            self._inbox.put(lambda: self._pending.extend(jobs))

    def cancel(self, jobs: Sequence[ChoiceJob]) -> None:
        """Nobody waits for these any more: their places are free before the next sweep."""
        for job in jobs:
            job.unwanted = True
        self._inbox.put(int)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Do something on the engine's thread, between steps."""
        future: Future[Any] = Future()

        def do() -> None:
            try:
                if self._closing:
                    raise shutting_down()
                future.set_result(work())
            except Exception as e:
                future.set_exception(e)

        with self._lock:
            if self._closing:
                future.set_exception(shutting_down())
            else:
                self._inbox.put(do)
        return future

    def close(self, wait_s: float | None = None) -> None:
        """End: what is under way fails, and the model is closed. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._inbox.put(int)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            join(self._thread, wait_s)

    # On the engine's thread

    def keep(self, name: str, keep_alive: float | None) -> None:
        """Have a model in memory, by way of ``call``; ``keep_alive`` 0: let it go, unless it is being asked.

        Raises:
            RequestError: another one is being asked, or several machines share it.
        """
        slot = self.slot
        if keep_alive == 0:
            if slot.loaded is not None and slot.loaded.leader is not None:
                raise RequestError("the model stays loaded: several machines share it", "not_supported")
            if slot.name == name and not slot.asked:
                slot.drop()
            return
        if slot.name not in (None, name) and (slot.asked or self._pending):
            raise RequestError(f"{slot.name} is answering; try again later", "busy", status=503, retry_after=RETRY_S)
        loaded = slot.loaded if slot.loaded is not None and slot.name == name else slot.switch(name)
        loaded.stay(slot.keep_alive if keep_alive is None else keep_alive)

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
            # What is queued on a thread's streams goes with them, and MLX may count it as under way for ever: near a
            # memory limit it would wait for that.
            with contextlib.suppress(RuntimeError):
                with mx.stream(generation_stream):
                    mx.synchronize()
                mx.synchronize()

    def _ends_with(self, error: Exception) -> bool:
        """Whether the thread ends with an error, as all ranks do that share the model."""
        if self.slot.loaded is None or (leader := self.slot.loaded.leader) is None:
            return False
        leader.fail(one_line(error))
        log.error("all machines end: %s", one_line(error), exc_info=not isinstance(error, OutcoreError))
        self.failure = error
        self._fail_all(error)
        return True

    def _listen(self) -> None:
        """Take what has come; wait for it where there is nothing else to do."""
        slot = self.slot
        if self._pending or slot.asked:
            self._take_in()
        elif slot.loaded is None:
            self._take_in(None)
        else:
            slot.loaded.rest()
            self._take_in(slot.left_s if slot.loaded.leader is None else LOOK_S)
        if not slot.asked and not self._pending and slot.left_s == 0:
            slot.drop()
        for job in [job for job in self._pending if job.unwanted]:
            self._pending.remove(job)
            self._jobs.discard(job)
        if (loaded := slot.loaded) is not None:
            gone = [uid for uid, writer in loaded.jobs.items() if writer.job.unwanted]
            for uid in gone:
                self._jobs.discard(loaded.jobs.pop(uid).job)
            if gone:
                loaded.sequences.remove(gone)

    def _take_in(self, wait_s: float | None = 0) -> None:
        """Do what is in the inbox; wait so long for the first of it (None: for ever)."""
        with contextlib.suppress(queue.Empty):
            work = self._inbox.get_nowait() if wait_s == 0 else self._inbox.get(timeout=wait_s)
            while True:
                work()
                work = self._inbox.get_nowait()

    def _work(self) -> None:
        """One step."""
        slot = self.slot
        if self._pending and not slot.asked and slot.name != (name := self._pending[0].model):
            try:
                self._pending[0].load_s = slot.switch(name).load_s
            except Exception as e:
                log.warning("%s cannot be loaded: %s", name, one_line(e))
                for job in [job for job in self._pending if job.model == name]:
                    self._pending.remove(job)
                    self._failed(job, e)
                return
        if (loaded := slot.loaded) is None:
            return
        while self._pending and self._pending[0].model == loaded.name:
            self._take(loaded, self._pending.popleft())
        if not loaded.jobs:
            return
        # Of several ranks all have to end a step, or none can go on.
        with asking(self._look if loaded.leader is None else lambda: None):
            step = loaded.sequences.step()
        for uid, (drafted, accepted) in step.drafts.items():
            job = loaded.jobs[uid].job
            job.drafted += drafted
            job.accepted += accepted
        self._tell(loaded, step)

    def _look(self) -> None:
        """In the middle of a step: see whether it is wanted still.

        Raises:
            _Unwanted: by nobody.
        """
        loaded = self.slot.loaded
        if self._closing or (loaded is not None and all(writer.job.unwanted for writer in loaded.jobs.values())):
            raise _Unwanted

    def _take(self, loaded: Loaded, job: ChoiceJob) -> None:
        uid = next(self._uids)
        try:
            request = request_of(uid, job.prompt, job.ask.sampling, job.max_tokens, job.ask.logprobs)
            loaded.take(uid, Writer(job))
        except Exception as e:
            self._failed(job, e)
            return
        loaded.sequences.ends = job.tokenizer.eos_token_ids
        loaded.sequences.add(request)

    def _tell(self, loaded: Loaded, step: StepResult) -> None:
        now = time.monotonic()
        for uid, prompt_s in step.joined.items():
            job = loaded.jobs[uid].job
            job.joined_at, queued_s = now, now - prompt_s - job.asked_at
            prompt_tokens, found = len(job.prompt.tokens), step.found.get(uid, 0)
            job.tell(Begun(job.model, prompt_tokens, found, job.load_s, queued_s, prompt_s))
        over: dict[int, Event | Exception] = {}
        for token in step.tokens:
            loaded.tokens += 1
            try:
                said = loaded.jobs[token.uid].add(token)
            except Exception as e:  # a model may have more tokens than its tokenizer has texts for
                over[token.uid] = e
                continue
            self._say(loaded.jobs[token.uid].job, said, over, token.uid)
        for uid in step.full:
            log.warning("an answer ended for want of memory for a longer context")
            self._say(loaded.jobs[uid].job, loaded.jobs[uid].end("length"), over, uid)
        # First the place is free, then it is told: who has heard the end of its answer sees it run no more.
        loaded.sequences.remove([uid for uid in over if uid not in step.full])
        for uid, end in over.items():
            job = loaded.jobs.pop(uid).job
            if isinstance(end, Exception):
                self._failed(job, end)
                continue
            self._jobs.discard(job)
            if job.ask.keep_alive is not None:
                loaded.stay(job.ask.keep_alive)
            job.tell(end)
        concerned = Counter(id(error) for _, error in step.failed)
        for uid, error in step.failed:
            # What failed for several together is not the length of one's prompt.
            self._failed(loaded.jobs.pop(uid).job, error, concerned[id(error)] == 1)

    def _say(self, job: ChoiceJob, said: Sequence[Event], over: dict[int, Event | Exception], uid: int) -> None:
        for event in said:
            if isinstance(event, Ended):
                over[uid] = event
            else:
                job.tell(event)

    def _failed(self, job: ChoiceJob, error: Exception, alone: bool = False) -> None:
        self._jobs.discard(job)
        job.tell(as_request_error(error, job, alone))

    def _fail_all(self, error: Exception) -> None:
        """Whatever is under way or waits fails; the model goes, since nobody knows what state it is in. What comes
        meanwhile, perhaps from those who are told, is not of this error."""
        loaded, pending = self.slot.loaded, list(self._pending)
        self._pending.clear()
        jobs = [writer.job for writer in loaded.jobs.values()] if loaded is not None else []
        if loaded is not None:
            loaded.jobs.clear()
        del loaded
        for job in jobs:
            self._failed(job, error)
        self.slot.drop()
        for job in pending:
            self._failed(job, error)


class _Unwanted(BaseException):
    """A step was broken off that nobody waits for."""


def too_many(waiting: int) -> RequestError:
    """That so many wait already."""
    why = f"{waiting} requests wait already; try again later"
    return RequestError(why, "too_many_requests", status=429, retry_after=RETRY_S)
