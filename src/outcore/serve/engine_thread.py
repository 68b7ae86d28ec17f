"""The thread that computes. MLX's streams belong to threads: this one loads models, runs them and lets them go.

Jobs come through a queue and are told what becomes of them. They are taken in the order in which they came; a job for
another model than the one that is loaded waits until all before it have ended, and those after it wait behind it. An
error fails the jobs that it concerns, never the thread. Of a model that ranks share the first rank has the engine: it
stays loaded, and an error that no rank can go on after ends the thread on purpose. Between two parts of a step it looks
whether that is wanted still: where nobody does any more, or the server ends, it is broken off.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generation_stream

from ..decode.continuous import Continuous
from ..decode.step import StepResult
from ..decode.wired import generating
from ..engine.session import Session
from ..errors import OutcoreError, RequestError
from ..machine.allocator import clear_cache
from ..machine.interrupts import asking
from ..machine.threads import join
from ..monitoring import publish
from ..text import one_line
from .choice import ChoiceFinished, ChoiceJob, ChoiceStarted, Writer, as_request_error
from .loaded import Call, Loaded

log = logging.getLogger("outcore.serve")

RETRY_S = 5.0
"""Seconds after which a client that was sent away may try again."""

LOOK_S = 0.5
"""Seconds after which it looks whether the ranks that share the model are still there, when nobody asks."""


class EngineThread:
    """Runs jobs.

    Args:
        open_model: loads a model by its name.
        most: sequences that share sweeps at most.
        prefill_step, draft_tokens: as in ``Continuous``.
        keep_alive: seconds that a model stays loaded when nobody asks for it; None: for good.
        most_waiting: jobs that may wait.

    Attributes:
        loaded: the model that is in memory; read from other threads, never waited for.
        loading: the name of the one that is being loaded.
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
        self._open = open_model
        self._options: dict[str, Any] = {"most": most, "prefill_step": prefill_step, "draft_tokens": draft_tokens}
        self._keep_alive, self._most_waiting = keep_alive, most_waiting
        self.loaded: Loaded | None = None
        self.loading: str | None = None
        self.failure: Exception | None = None
        self.before: dict[str, dict[str, int]] = {}  # counters of models that were let go
        self._inbox: queue.SimpleQueue[ChoiceJob | Call | None] = queue.SimpleQueue()
        self._pending: deque[ChoiceJob] = deque()
        self._uids = itertools.count()
        self._open_jobs = 0  # submitted, and not over
        self._lock = threading.Lock()
        self._closing = False
        self._alive = keep_alive
        self._thread = threading.Thread(target=self._run, name="outcore-engine", daemon=True)

    # From any thread

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    @property
    def running(self) -> int:
        """Choices that are being written."""
        loaded = self.loaded
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
                raise RequestError(
                    f"{self.waiting} requests wait already; try again later",
                    "too_many_requests",
                    status=429,
                    retry_after=RETRY_S,
                )
            self._open_jobs += len(jobs)
            # With the lock held: what is in when the thread ends is told so.
            for job in jobs:
                self._inbox.put(job)

    def cancel(self, jobs: Sequence[ChoiceJob]) -> None:
        """Nobody waits for these any more: their places are free before the next sweep."""
        for job in jobs:
            job.unwanted = True
        self._inbox.put(None)

    def call(self, work: Callable[[], Any], done: Callable[[Any], None]) -> None:
        """Do something on the engine's thread, between steps; ``done`` gets what it returns or raises."""
        with self._lock:
            if not self._closing:
                self._inbox.put(Call(work, done))
                return
        done(_ended())

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
        there = self._name
        if there is not None and there != name and (self._asked or self._pending):
            raise RequestError(f"{there} is answering; try again later", "busy", status=503, retry_after=RETRY_S)
        if there != name:
            self._switch(name)
        self._stay(keep_alive)

    def unload(self, name: str | None = None) -> None:
        """Let the model go, by way of ``call``, unless it is being asked.

        Raises:
            RequestError: several machines share it.
        """
        if self.loaded is not None and self.loaded.leader is not None:
            raise RequestError("the model stays loaded: several machines share it", "not_supported")
        if name in (None, self._name) and not self._asked:
            self._drop()

    @property
    def _name(self) -> str | None:
        return self.loaded.name if self.loaded is not None else None

    @property
    def _asked(self) -> bool:
        """Whether the model is writing."""
        return self.loaded is not None and bool(self.loaded.jobs)

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
            self._refuse()
            # What is queued on a thread's streams goes with them, and MLX may count it as under way for ever: near a
            # memory limit it would wait for that.
            with contextlib.suppress(RuntimeError):
                with mx.stream(generation_stream):
                    mx.synchronize()
                mx.synchronize()

    def _ends_with(self, error: Exception) -> bool:
        """Whether the thread ends with an error, as all ranks do that share the model."""
        if self.loaded is None or (leader := self.loaded.leader) is None:
            return False
        leader.fail(one_line(error))
        log.error("all machines end: %s", one_line(error), exc_info=not isinstance(error, OutcoreError))
        self.failure = error
        self._fail_all(error)
        return True

    def _listen(self) -> None:
        """Take what has come; wait for it where there is nothing else to do."""
        idle, patience = not self._pending and not self._asked, self._patience()
        if idle and self.loaded is not None:
            self._rest(self.loaded)
            patience = LOOK_S if self.loaded.leader is not None else self._patience()
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=patience) if idle else self._inbox.get_nowait()
            while True:
                if isinstance(item, ChoiceJob):
                    self._pending.append(item)
                elif isinstance(item, Call):
                    self._do(item)
                item = self._inbox.get_nowait()
        if not self._asked and not self._pending and self._patience() == 0:
            self._drop()
        self._leave()

    def _patience(self) -> float | None:
        """Seconds until the model is unloaded; None: it stays."""
        until = self.loaded.until if self.loaded is not None else None
        return None if until is None else max(0.0, until - time.monotonic())

    def _do(self, call: Call) -> None:
        try:
            result = call.work()
        except Exception as e:
            result = e
        call.done(result)

    def _leave(self) -> None:
        """Jobs that nobody wants any more end."""
        for job in [job for job in self._pending if job.unwanted]:
            self._pending.remove(job)
            self._over(job)
        loaded = self.loaded
        if loaded is None:
            return
        gone = [uid for uid, writer in loaded.jobs.items() if writer.job.unwanted]
        self._remove(loaded, gone)

    def _work(self) -> None:
        """One step."""
        if self._pending and not self._asked and self._name != self._pending[0].model:
            name = self._pending[0].model
            try:
                self._switch(name)
            except Exception as e:
                log.warning("%s cannot be loaded: %s", name, one_line(e))
                self._fail_pending(name, e)
                return
            assert self.loaded is not None
            self._pending[0].load_s = self.loaded.load_s
        loaded = self.loaded
        if loaded is None:
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
        loaded = self.loaded
        if self._closing or (loaded is not None and all(writer.job.unwanted for writer in loaded.jobs.values())):
            raise _Unwanted

    def _take(self, loaded: Loaded, job: ChoiceJob) -> None:
        uid = next(self._uids)
        try:
            request, writer = job.request(uid), Writer(job)
        except Exception as e:
            self._failed(job, e)
            return
        loaded.until = None
        if not loaded.awake:
            loaded.awake = True
            loaded.busy.enter_context(generating(loaded.model))
        loaded.jobs[uid] = writer
        loaded.sequences.ends = job.tokenizer.eos_token_ids
        loaded.sequences.add(request)

    def _tell(self, loaded: Loaded, step: StepResult) -> None:
        now = time.monotonic()
        for uid, prompt_s in step.joined.items():
            job = loaded.jobs[uid].job
            job.joined_at = now
            job.tell(ChoiceStarted(job.load_s, now - prompt_s - job.asked_at, prompt_s, step.found.get(uid, 0)))
        over: dict[int, ChoiceFinished | Exception] = {}
        for token in step.tokens:
            writer = loaded.jobs[token.uid]
            loaded.tokens += 1
            try:
                outs = writer.add(token)
            except Exception as e:  # a model may have more tokens than its tokenizer has texts for
                over[token.uid] = e
                continue
            for out in outs:
                if isinstance(out, ChoiceFinished):
                    over[token.uid] = out
                else:
                    writer.job.tell(out)
        # First the place is free, then it is told: who has heard the end of its answer sees it run no more.
        loaded.sequences.remove(list(over))
        for uid, end in over.items():
            if isinstance(end, ChoiceFinished):
                self._end(loaded, uid, end)
            else:
                self._failed(loaded.jobs.pop(uid).job, end)
        for uid in step.full:
            log.warning("an answer ended for want of memory for a longer context")
            self._end(loaded, uid, loaded.jobs[uid].end("length"))
        concerned = Counter(id(error) for _, error in step.failed)
        for uid, error in step.failed:
            writer = loaded.jobs.pop(uid)
            # What failed for several together is not the length of one's prompt.
            self._failed(writer.job, error, concerned[id(error)] == 1)

    def _end(self, loaded: Loaded, uid: int, over: ChoiceFinished) -> None:
        job = loaded.jobs.pop(uid).job
        self._over(job)
        if job.keep_alive is not None:
            self._stay(job.keep_alive)
        job.tell(over)

    def _remove(self, loaded: Loaded, uids: Sequence[int]) -> None:
        for uid in uids:
            self._over(loaded.jobs.pop(uid).job)
        if uids:
            loaded.sequences.remove(uids)

    def _over(self, job: ChoiceJob) -> None:
        with self._lock:
            self._open_jobs -= 1

    def _failed(self, job: ChoiceJob, error: Exception, alone: bool = False) -> None:
        self._over(job)
        job.tell(as_request_error(error, job, alone))

    def _fail_pending(self, name: str, error: Exception) -> None:
        for job in [job for job in self._pending if job.model == name]:
            self._pending.remove(job)
            self._failed(job, error)

    def _fail_all(self, error: Exception) -> None:
        """Whatever is under way or waits fails; the model goes, since nobody knows what state it is in. What comes
        meanwhile, perhaps from those who are told, is not of this error."""
        loaded = self.loaded
        for writer in list(loaded.jobs.values()) if loaded is not None else []:
            self._failed(writer.job, error)
        if loaded is not None:
            loaded.jobs.clear()
        loaded = None
        self._drop()
        while self._pending:
            self._failed(self._pending.popleft(), error)

    def _refuse(self) -> None:
        """The thread ends: nothing more will be done of what came."""
        with contextlib.suppress(queue.Empty):
            while True:
                item = self._inbox.get_nowait()
                if isinstance(item, ChoiceJob):
                    self._failed(item, _ended())
                elif isinstance(item, Call):
                    item.done(_ended())

    # Models

    def _switch(self, name: str) -> None:
        self._drop()
        self.loading, began = name, time.monotonic()
        try:
            model = self._open(name)
        finally:
            self.loading = None
        publish(model, "serve", name)
        session: Session = model.outcore
        own = Continuous(model, **self._options)
        sequences = session.transport.leader(own) or own
        self.loaded = Loaded(name, model, sequences, time.monotonic() - began)
        self._stay(None)

    def _stay(self, keep_alive: float | None) -> None:
        """Let the model stay for so long after it was asked last; None: as the server says; negative: for good. What
        ranks share stays for good."""
        if self.loaded is None or self.loaded.leader is not None:
            return
        seconds = self._keep_alive if keep_alive is None else keep_alive
        self._alive = None if seconds is None or seconds < 0 else seconds
        # While it is asked, the time has not begun.
        self.loaded.until = None if self._alive is None or self.loaded.jobs else time.monotonic() + self._alive

    def _rest(self, loaded: Loaded) -> None:
        """Nobody asks the model for anything now."""
        loaded.busy.close()
        loaded.awake = False
        if loaded.leader is not None:
            loaded.leader.rest()
        if loaded.until is None and self._alive is not None:
            loaded.until = time.monotonic() + self._alive
        clear_cache()

    def counters(self, name: str, loaded: Loaded | None) -> dict[str, int]:
        """What a model has done, loaded now or before."""
        found = Counter(self.before.get(name, {}))
        if loaded is not None and loaded.name == name:
            found.update(loaded.counters)
        return dict(found)

    def _drop(self) -> None:
        loaded, self.loaded = self.loaded, None
        if loaded is None:
            return
        self.before[loaded.name] = self.counters(loaded.name, loaded)
        with contextlib.suppress(Exception):
            loaded.sequences.close()
        with contextlib.suppress(Exception):
            loaded.busy.close()
        try:
            loaded.session.close()
        except Exception:
            log.exception("%s cannot be closed", loaded.name)
        # What refers to itself would stay beside the next model; nor may callers refer to this one.
        del loaded
        gc.collect()
        clear_cache()


class _Unwanted(BaseException):
    """A step was broken off that nobody waits for."""


def _ended() -> RequestError:
    return RequestError("the server is shutting down", "shutting_down", status=503)
