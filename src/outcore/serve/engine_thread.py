"""The thread that computes. MLX's streams belong to threads: this one loads models, runs them and lets them go.

Jobs come through a queue and are told what becomes of them. They are taken in the order in which they came; a job for
another model than the one that is loaded waits until all before it have ended, and those after it wait behind it. An
error fails the jobs that it concerns, never the thread. Of a model that ranks share the first rank has the engine: it
stays loaded, and an error that no rank can go on after ends the thread on purpose. Between two parts of a step it looks
whether that is wanted still: where nobody does any more, or the server ends, it is broken off.
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
from ..machine.interrupts import asking
from ..machine.threads import join
from ..text import one_line
from .choice import ChoiceJob, Writer, as_request_error
from .events import Begun, Ended
from .model_slot import Loaded, ModelSlot

log = logging.getLogger("outcore.serve")

RETRY_S = 5.0
"""Seconds after which a client that was sent away may try again."""

LOOK_S = 0.5
"""Seconds after which it looks whether the ranks that share the model are still there, when nobody asks."""

Call = tuple[Callable[[], Any], Future[Any]]
"""Something else that is done on the thread, between steps."""


class EngineThread:
    """Runs jobs.

    Args:
        open_model: loads a model by its name.
        most: sequences that share sweeps at most.
        prefill_step, draft_tokens: as in ``Continuous``.
        keep_alive: seconds that a model stays loaded when nobody asks for it; None: for good.
        most_waiting: jobs that may wait.

    Attributes:
        slot: the model that is in memory; read from other threads, never waited for.
        failure: what no rank of several can go on after; the thread has ended.
    """

    def __init__(
        self,
        open_model: Callable[[str], nn.Module],
        *,
        most: int = 32,
        prefill_step: int | None = None,
        draft_tokens: int | None = None,
        keep_alive: float | None = None,
        most_waiting: int = 256,
    ) -> None:
        options = {"most": most, "prefill_step": prefill_step, "draft_tokens": draft_tokens}
        self.slot = ModelSlot(open_model, keep_alive, **options)
        self._most_waiting = most_waiting
        self.failure: Exception | None = None
        self._inbox: queue.SimpleQueue[ChoiceJob | Call | None] = queue.SimpleQueue()
        self._pending: deque[ChoiceJob] = deque()
        self._uids = itertools.count()
        self._open_jobs = 0  # submitted, and not over
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="outcore-engine", daemon=True)

    # From any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def running(self) -> int:
        """Choices that are being written."""
        loaded = self.slot.loaded
        return loaded.sequences.running if loaded is not None else 0

    @property
    def waiting(self) -> int:
        """Choices that wait."""
        return max(0, self._open_jobs - self.running)

    def submit(self, jobs: Sequence[ChoiceJob]) -> None:
        """Have these answered.

        Raises:
            RequestError: too many wait already (429), or the server ends (503).
        """
        with self._lock:
            if self._closing:
                raise _ended()
            if self.waiting + len(jobs) > self._most_waiting:
                raise too_many(self.waiting)
            self._open_jobs += len(jobs)
            # With the lock held: what is in when the thread ends is told so.
            for job in jobs:
                self._inbox.put(job)

    def cancel(self, jobs: Sequence[ChoiceJob]) -> None:
        """Nobody waits for these any more: their places are free before the next sweep."""
        for job in jobs:
            job.unwanted = True
        self._inbox.put(None)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Do something on the engine's thread, between steps."""
        future: Future[Any] = Future()
        with self._lock:
            if self._closing:
                future.set_exception(_ended())
            else:
                self._inbox.put((work, future))
        return future

    def close(self, wait_s: float | None = None) -> None:
        """End: what is under way fails, and the model is closed. Safe to call twice."""
        with self._lock:
            self._closing = True
        self._inbox.put(None)
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            join(self._thread, wait_s)

    # On the engine's thread

    def load(self, name: str, keep_alive: float | None) -> None:
        """Have a model in memory, by way of ``call``. Where another one is being asked, that goes on first."""
        slot = self.slot
        if slot.name not in (None, name) and (slot.asked or self._pending):
            raise RequestError(f"{slot.name} is answering; try again later", "busy", status=503, retry_after=RETRY_S)
        if slot.name != name:
            slot.switch(name)
        slot.stay(keep_alive)

    def unload(self, name: str) -> None:
        """Let the model go, by way of ``call``, unless it is being asked.

        Raises:
            RequestError: several machines share it.
        """
        if self.slot.loaded is not None and self.slot.loaded.leader is not None:
            raise RequestError("the model stays loaded: several machines share it", "not_supported")
        if self.slot.name == name and not self.slot.asked:
            self.slot.drop()

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
            self._fail_all(_ended())
            self._take_in(lambda job: self._failed(job, _ended()), lambda call: call[1].set_exception(_ended()))
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
        wait_s: float | None = 0.0
        if not self._pending and not slot.asked:
            slot.rest()
            wait_s = LOOK_S if slot.loaded is not None and slot.loaded.leader is not None else slot.left_s
        self._take_in(self._pending.append, _do, wait_s)
        if not slot.asked and not self._pending and slot.left_s == 0:
            slot.drop()
        for job in [job for job in self._pending if job.unwanted]:
            self._pending.remove(job)
            self._over(job)
        if (loaded := slot.loaded) is not None:
            gone = [uid for uid, writer in loaded.jobs.items() if writer.job.unwanted]
            for uid in gone:
                self._over(loaded.jobs.pop(uid).job)
            if gone:
                loaded.sequences.remove(gone)

    def _take_in(
        self, on_job: Callable[[ChoiceJob], None], on_call: Callable[[Call], None], wait_s: float | None = 0
    ) -> None:
        """Empty the inbox; wait so long for the first of it (None: for ever)."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get_nowait() if wait_s == 0 else self._inbox.get(timeout=wait_s)
            while True:
                if isinstance(item, ChoiceJob):
                    on_job(item)
                elif item is not None:
                    on_call(item)
                item = self._inbox.get_nowait()

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
            request, writer = job.request(uid), Writer(job)
        except Exception as e:
            self._failed(job, e)
            return
        loaded.wake()
        loaded.jobs[uid] = writer
        loaded.sequences.ends = job.tokenizer.eos_token_ids
        loaded.sequences.add(request)

    def _tell(self, loaded: Loaded, step: StepResult) -> None:
        now = time.monotonic()
        for uid, prompt_s in step.joined.items():
            job = loaded.jobs[uid].job
            job.joined_at, queued_s = now, now - prompt_s - job.asked_at
            prompt_tokens, found = len(job.prompt.tokens), step.found.get(uid, 0)
            job.tell(Begun(job.model, prompt_tokens, found, job.load_s, queued_s, prompt_s))
        over: dict[int, Ended | Exception] = {}
        for token in step.tokens:
            loaded.tokens += 1
            try:
                said = loaded.jobs[token.uid].add(token)
            except Exception as e:  # a model may have more tokens than its tokenizer has texts for
                over[token.uid] = e
                continue
            for event in said:
                if isinstance(event, Ended):
                    over[token.uid] = event
                else:
                    loaded.jobs[token.uid].job.tell(event)
        # First the place is free, then it is told: who has heard the end of its answer sees it run no more.
        loaded.sequences.remove(list(over))
        for uid, end in over.items():
            self._end(loaded, uid, end)
        for uid in step.full:
            log.warning("an answer ended for want of memory for a longer context")
            *said, full = loaded.jobs[uid].end("length")
            for event in said:
                loaded.jobs[uid].job.tell(event)
            assert isinstance(full, Ended)
            self._end(loaded, uid, full)
        concerned = Counter(id(error) for _, error in step.failed)
        for uid, error in step.failed:
            # What failed for several together is not the length of one's prompt.
            self._failed(loaded.jobs.pop(uid).job, error, concerned[id(error)] == 1)

    def _end(self, loaded: Loaded, uid: int, end: Ended | Exception) -> None:
        job = loaded.jobs.pop(uid).job
        if isinstance(end, Exception):
            self._failed(job, end)
            return
        self._over(job)
        if job.keep_alive is not None:
            self.slot.stay(job.keep_alive)
        job.tell(end)

    def _over(self, job: ChoiceJob) -> None:
        with self._lock:
            self._open_jobs -= 1

    def _failed(self, job: ChoiceJob, error: Exception, alone: bool = False) -> None:
        self._over(job)
        job.tell(as_request_error(error, job, alone))

    def _fail_all(self, error: Exception) -> None:
        """Whatever is under way or waits fails; the model goes, since nobody knows what state it is in. What comes
        meanwhile, perhaps from those who are told, is not of this error."""
        if self.slot.loaded is not None:
            for writer in list(self.slot.loaded.jobs.values()):
                self._failed(writer.job, error)
            self.slot.loaded.jobs.clear()
        self.slot.drop()
        while self._pending:
            self._failed(self._pending.popleft(), error)


class _Unwanted(BaseException):
    """A step was broken off that nobody waits for."""


def _do(call: Call) -> None:
    work, future = call
    try:
        future.set_result(work())
    except Exception as e:
        future.set_exception(e)


def too_many(waiting: int) -> RequestError:
    """That so many wait already."""
    why = f"{waiting} requests wait already; try again later"
    return RequestError(why, "too_many_requests", status=429, retry_after=RETRY_S)


def _ended() -> RequestError:
    return RequestError("the server is shutting down", "shutting_down", status=503)
