"""The server's engine where things go wrong: its thread goes on, memory comes back, and everybody is told."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outcore.decode.request import Token
from outcore.decode.scheduler import Scheduler
from outcore.engine.session import Session
from outcore.errors import BudgetError, CheckpointError, RequestError
from outcore.serve.choice import AnswerChoice
from outcore.serve.events import Ended, Finished, GenerationRequest
from outcore.serve.service import ModelService
from test_service import heard, serving, text_of, together

ASK = GenerationRequest(prompt="def add(a, b):", max_tokens=6)
OTHER = GenerationRequest(prompt="import os\n", max_tokens=6)


def idle(service: Any) -> bool:
    """Whether nothing is left of what was asked, soon."""
    engine, until = service.engine, time.monotonic() + 60

    def nothing() -> bool:
        return bool(engine.running == engine.waiting == 0)

    while not nothing() and time.monotonic() < until:
        time.sleep(0.005)
    return nothing()


def test_a_model_has_left_memory_before_the_next_is_loaded(served: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(served, tmp_path / "other"))
    left: list[Any] = []
    there: list[bool] = []
    gc.disable()
    try:
        with serving(served, other) as service:
            original = service.engine.open

            def load(name: str) -> Any:
                there.append(any(model() is not None for model in left))
                model = original(name)
                left.append(weakref.ref(model))
                return model

            service.engine.open = load
            for name in ("other", str(served), "other"):
                asyncio.run(heard(service, GenerationRequest(model=name, prompt="a", max_tokens=2)))
            asyncio.run(service.load(str(served), None))
            asyncio.run(service.load("", 0))
            assert service.engine.loaded is None
        assert there == [False] * 4 and not any(model() is not None for model in left)
    finally:
        gc.enable()


def test_after_the_end_of_an_answer_it_is_not_counted_as_running(served: Path) -> None:
    running: list[int] = []

    async def hears(service: ModelService) -> None:
        async for event in service.answer(ASK):
            if isinstance(event, Ended):
                running.append(service.engine.running)

    with serving(served) as service:
        asyncio.run(hears(service))
    assert running == [0]


def test_what_fails_anywhere_ends_jobs_not_the_thread(served: Path) -> None:
    def broken(_: Any, *given: Any) -> None:
        if given != ([],):
            raise OSError("broken")

    with serving(served, max_tokens=100_000) as service:
        expected = text_of(asyncio.run(heard(service, ASK)))

        async def leaves(where: Any, what: str) -> None:
            answer: Any = service.answer(GenerationRequest(prompt="import os\n"))
            await anext(answer)
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(where, what, broken)
                await answer.aclose()
                await service.load("", 0)
                assert idle(service)

        for where, what in ((Scheduler, "remove"), (Session, "close")):
            asyncio.run(leaves(where, what))
            assert text_of(asyncio.run(asyncio.wait_for(heard(service, ASK), 30))) == expected


def test_a_retry_does_not_get_the_error_before(served: Path) -> None:
    with serving(served) as service:
        asyncio.run(heard(service, ASK))
        original = service.engine.drop

        async def again() -> str:
            asked = threading.Event()

            def drop() -> None:
                asked.wait(20)
                original()

            service.engine.drop = drop
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Scheduler, "step", lambda _: 1 / 0)
                with pytest.raises(RequestError):
                    await heard(service, ASK)
            task = asyncio.create_task(heard(service, ASK))
            while not service.engine.waiting:
                await asyncio.sleep(0.005)
            asked.set()
            return text_of(await task)

        assert asyncio.run(again()) and idle(service)


def test_a_token_without_a_text_ends_its_own_answer_alone(served: Path) -> None:
    original = AnswerChoice.add

    def add(self: AnswerChoice, token: Token) -> Any:
        if self.request.max_tokens == 7 and self.tokens == 2:
            raise IndexError("a token that the tokenizer does not have")
        return original(self, token)

    with serving(served) as service, pytest.MonkeyPatch.context() as patched:
        expected = text_of(asyncio.run(heard(service, OTHER)))
        patched.setattr(AnswerChoice, "add", add)
        model = service.engine.loaded

        async def both() -> Any:
            asks = (GenerationRequest(prompt="def add(a, b):", max_tokens=7), OTHER)
            return await asyncio.gather(*(heard(service, ask) for ask in asks), return_exceptions=True)

        failed, written = asyncio.run(both())
        assert isinstance(failed, RequestError) and failed.status == 500
        assert text_of(written) == expected and service.engine.loaded is model and idle(service)
        assert model is not None and model.sequences.running == 0


def test_no_memory_for_all_together_blames_no_prompt(served: Path) -> None:
    def sweep(self: Scheduler, *_: Any, **__: Any) -> Any:
        raise BudgetError("no room", 10**9)

    with serving(served) as service, pytest.MonkeyPatch.context() as patched:
        patched.setattr(Scheduler, "_run_pass", sweep)

        async def failures(*asks: GenerationRequest) -> set[tuple[int, str]]:
            found = await asyncio.gather(*(heard(service, ask) for ask in asks), return_exceptions=True)
            assert all(isinstance(error, RequestError) for error in found)
            return {(error.status, error.code) for error in found if isinstance(error, RequestError)}

        assert asyncio.run(failures(ASK)) == {(400, "context_length_exceeded")}
        go = threading.Event()
        service.engine.call(go.wait)

        async def both() -> set[tuple[int, str]]:
            asked = asyncio.create_task(failures(ASK, OTHER))
            while service.engine.waiting < 2:
                await asyncio.sleep(0.001)
            go.set()
            return await asked

        assert asyncio.run(both()) == {(503, "insufficient_memory")} and idle(service)


def test_a_model_that_cannot_be_loaded_is_out_of_memory_only_where_memory_is_short(served: Path) -> None:
    with serving(served) as service, pytest.MonkeyPatch.context() as patched:
        for error, told in ((BudgetError("no room", 10**9), 503), (CheckpointError("weights are cut off"), 500)):

            def fail(*_: Any, error: Exception = error) -> None:
                raise error

            patched.setattr(service.engine, "keep", fail)
            with pytest.raises(RequestError) as refused:
                asyncio.run(service.load("", None))
            assert refused.value.status == told


def test_a_client_that_goes_away_while_it_has_a_model_loaded_ends_no_answer(served: Path) -> None:
    with serving(served) as service:

        async def leaves(works: bool) -> list[Any]:
            """Leaves while the load waits for its turn, or while it is worked on."""
            go, at_work = threading.Event(), threading.Event()

            def keep(*_: Any) -> None:
                at_work.set()
                go.wait()

            with pytest.MonkeyPatch.context() as patched:
                if works:
                    patched.setattr(service.engine, "keep", keep)
                else:
                    service.engine.call(go.wait)
                load = asyncio.create_task(service.load("", None))
                answer = asyncio.create_task(heard(service, ASK))
                while service.engine.waiting < 1 or works > at_work.is_set():
                    await asyncio.sleep(0.001)
                load.cancel()
                await asyncio.wait([load])
                go.set()
                return await answer

        said = [text_of(asyncio.run(leaves(works))) for works in (True, False)]
        assert said[0] == said[1] and service.engine.loaded is not None


def test_each_answer_has_its_own_drafts(served: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.step

    def step(self: Scheduler) -> Any:
        found = original(self)
        if len(found.tokens) == 1:
            found.drafts = {found.tokens[0].uid: (3, 2)}
        return found

    monkeypatch.setattr(Scheduler, "step", step)
    with serving(served, memory="24MB") as service:
        short, long = together(service, [replace(ASK, max_tokens=2), replace(OTHER, max_tokens=6)])
        told = [(e.drafted, e.accepted) for e in (short[-1], long[-1]) if isinstance(e, Finished)]
        assert told == [(0, 0), (12, 8)]


def test_a_server_that_has_ended_says_so_to_everybody(served: Path) -> None:
    with serving(served) as service:
        service.close()
        for call in (service.load("", None), service.load("", 0), heard(service, ASK)):
            with pytest.raises(RequestError) as ended:
                asyncio.run(asyncio.wait_for(call, 20))
            assert ended.value.status == 503


def test_the_time_until_a_model_goes_begins_with_the_last_answer(served: Path) -> None:
    with serving(served, max_tokens=100_000) as service:

        async def two() -> float | None:
            answer: Any = service.answer(GenerationRequest(prompt="import os\n"))
            await anext(answer)
            await heard(service, GenerationRequest(prompt="a", max_tokens=1, keep_alive=0.05))
            await asyncio.sleep(0.1)
            assert service.engine.loaded is not None
            until = service.engine.loaded.left_s
            await heard(service, GenerationRequest(prompt="a", max_tokens=1, keep_alive=60))
            assert service.engine.loaded.left_s is None
            await answer.aclose()
            return until

        assert asyncio.run(two()) is None and idle(service)
        time.sleep(0.05)
        left = service.card("").expires_at
        assert left is not None and 50 < left - time.time() <= 60
