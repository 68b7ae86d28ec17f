"""The server's engine behind its service: answers that are those of ``generate``, whoever else is asking."""

from __future__ import annotations

import asyncio
import shutil
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import outcore
from outcore.decode.scheduler import Scheduler
from outcore.errors import RequestError
from outcore.options import LoadOptions
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, Sampling, TextPart
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf

LOAD: dict[str, Any] = {
    "context": 128,
    "dtype": "float32",
    "cpu_streams": 1,
    "govern": False,
    "draft": "none",
    "resident": 0,
}
PROMPTS = ["def add(a, b):", "import os\n", "class Point:", "for i in range(10):", "The answer is"]


@contextmanager
def serving(
    *folders: Path, draft: str = "none", memory: str = "12MB", prefix_cache: str = "off", **options: Any
) -> Iterator[ModelService]:
    load = LoadOptions(**LOAD | {"memory": memory, "prefix_cache": prefix_cache, "draft": draft})
    service = ModelService(Shelf([str(f) for f in folders]), ServiceOptions(load, **options))
    try:
        yield service
    finally:
        service.close()


async def heard(service: ModelService, *asks: GenerationRequest) -> list[Event]:
    return [event async for event in service.answer(*asks)]


def text_of(events: Sequence[Event], index: int = 0) -> str:
    return "".join(e.text for e in events if isinstance(e, TextPart) and e.index == index)


def together(service: ModelService, asks: Sequence[GenerationRequest]) -> list[list[Event]]:
    """Ask all of them before the engine begins with any."""

    async def ask_all() -> list[list[Event]]:
        go = threading.Event()
        service.engine.call(go.wait)
        tasks = [asyncio.create_task(heard(service, ask)) for ask in asks]
        while service.engine.waiting < len(asks):
            await asyncio.sleep(0.001)
        go.set()
        return await asyncio.gather(*tasks)

    return asyncio.run(ask_all())


@pytest.fixture(scope="module")
def served(quick_models: Callable[[int], Path]) -> Path:
    """Three layers."""
    return quick_models(3)


@pytest.fixture(scope="module")
def expected(served: Path) -> dict[str, str]:
    """What ``generate`` answers."""
    model, tokenizer = outcore.load(str(served), memory="12MB", **LOAD)
    with model.outcore:
        return {p: outcore.generate(model, tokenizer, p, max_tokens=6) for p in PROMPTS}


def test_an_answer_is_generates_and_is_reported_in_order(served: Path, expected: dict[str, str]) -> None:
    with serving(served, draft="auto") as service:
        events = asyncio.run(heard(service, GenerationRequest(prompt=PROMPTS[0], max_tokens=6)))
        assert text_of(events) == expected[PROMPTS[0]]
        assert isinstance(events[0], Begun) and events[0].model == served.name and events[0].load_s > 0
        *_, ended, finished = events
        assert isinstance(ended, Ended) and ended.reason == "length" and ended.tokens == 6
        assert isinstance(finished, Finished) and finished.tokens == 6
        assert (
            finished.prompt_tokens
            == events[0].prompt_tokens
            == len(asyncio.run(service.prompt(GenerationRequest(prompt=PROMPTS[0]))).tokens)
        )
        assert finished.prompt_s > 0 and finished.generation_s > 0 and finished.queued_s >= events[0].load_s
        state = service.state()
        assert state["status"] == "ok" and state["running"] == state["waiting"] == 0
        assert state["models"][served.name]["tokens"] == 6


def test_sixteen_requests_share_passes(served: Path, expected: dict[str, str]) -> None:
    with serving(served, memory="400MB") as service:
        asyncio.run(heard(service, GenerationRequest(prompt="x", max_tokens=1)))
        steps = []
        original = Scheduler.step

        def step(self: Scheduler) -> Any:
            steps.append(1)
            return original(self)

        asks = [GenerationRequest(prompt=PROMPTS[i % len(PROMPTS)], max_tokens=6) for i in range(16)]
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Scheduler, "step", step)
            found = together(service, asks)
        assert len(steps) <= 8, "16 streams of 6 tokens"
        for ask, events in zip(asks, found, strict=True):
            assert text_of(events) == expected[str(ask.prompt)]


def test_choices_are_numbered_seeds_hold_and_stop_strings_end(served: Path) -> None:
    with serving(served) as service:
        ask = GenerationRequest(prompt=PROMPTS[0], max_tokens=4, choices=3, sampling=Sampling(temperature=1.0, seed=7))
        one, again = (asyncio.run(heard(service, ask)) for _ in range(2))
        texts = [text_of(one, i) for i in range(3)]
        assert texts == [text_of(again, i) for i in range(3)] and len(set(texts)) == 3
        assert isinstance(one[-1], Finished) and one[-1].tokens == 12
        whole = text_of(asyncio.run(heard(service, GenerationRequest(prompt=PROMPTS[1], max_tokens=6))))
        word = whole[len(whole) // 2 :][:3]
        cut = asyncio.run(heard(service, GenerationRequest(prompt=PROMPTS[1], max_tokens=6, stop=("never", word))))
        ended = next(e for e in cut if isinstance(e, Ended))
        assert text_of(cut) == whole[: whole.index(word)] and (ended.reason, ended.stop) == ("stop", word)


def test_several_prompts_are_one_answer_with_their_choices_in_order(served: Path, expected: dict[str, str]) -> None:
    asks = [GenerationRequest(prompt=prompt, max_tokens=6, choices=2) for prompt in PROMPTS[:3]]

    with serving(served, most_waiting=6) as service:
        found = asyncio.run(heard(service, *asks))
        assert isinstance(found[0], Begun) and sum(isinstance(e, Begun) for e in found) == 1
        assert [text_of(found, i) for i in range(6)] == [expected[p] for p in PROMPTS[:3] for _ in range(2)]
        tokens = sum(len(asyncio.run(service.prompt(each)).tokens) for each in asks)
        last = found[-1]
        assert isinstance(last, Finished) and (last.prompt_tokens, last.tokens, last.choices) == (tokens, 36, 6)
        too_long = replace(asks[0], prompt=(5,) * 100_000)
        with pytest.raises(RequestError, match="tokens"):
            asyncio.run(heard(service, *asks, too_long))
        assert service.engine.waiting == service.engine.running == 0


def test_logprobs_are_of_every_token_with_its_bytes(served: Path, expected: dict[str, str]) -> None:
    with serving(served) as service:
        events = asyncio.run(heard(service, GenerationRequest(prompt=PROMPTS[0], max_tokens=6, logprobs=2)))
        found = [each for e in events if isinstance(e, TextPart) for each in e.logprobs]
        assert len(found) == 6 and all(len(each.top) == 2 for each in found)
        assert all(each.top[0].logprob >= each.top[1].logprob and each.logprob <= 0 for each in found)
        assert b"".join(each.data for each in found).decode(errors="replace") == expected[PROMPTS[0]]


def test_a_client_that_leaves_frees_its_place_and_disturbs_no_other(served: Path, expected: dict[str, str]) -> None:
    with serving(served, max_tokens=100_000) as service:

        async def some() -> str:
            async with aclosing(service.answer(GenerationRequest(prompt=PROMPTS[1]))) as endless:
                n = 0
                task: asyncio.Task[list[Event]] | None = None
                async for event in endless:
                    n += isinstance(event, TextPart)
                    if n == 2 and task is None:
                        task = asyncio.create_task(heard(service, GenerationRequest(prompt=PROMPTS[2], max_tokens=6)))
                    if n == 6:
                        break
            assert task is not None
            return text_of(await task)

        assert asyncio.run(some()) == expected[PROMPTS[2]]
        began = time.monotonic()
        while service.state()["running"] and time.monotonic() < began + 10:
            time.sleep(0.01)
        assert service.state()["running"] == service.state()["waiting"] == 0


def test_too_many_requests_and_too_long_prompts_are_refused(served: Path) -> None:
    with serving(served, most_waiting=2) as service:

        async def three() -> list[Any]:
            go = threading.Event()
            service.engine.call(go.wait)
            tasks = [asyncio.create_task(heard(service, GenerationRequest(prompt="a", max_tokens=2))) for _ in range(3)]
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            go.set()
            with pytest.raises(RequestError) as refused:
                done.pop().result()
            assert refused.value.status == 429 and refused.value.retry_after
            return await asyncio.gather(*tasks, return_exceptions=True)

        assert sum(isinstance(events, list) for events in asyncio.run(three())) == 2
        with pytest.raises(RequestError, match="30000 tokens") as long:
            asyncio.run(heard(service, GenerationRequest(prompt=tuple([5] * 30_000), max_tokens=2)))
        assert long.value.code == "context_length_exceeded" and long.value.status == 400
        assert len(asyncio.run(heard(service, GenerationRequest(prompt="a", max_tokens=2)))) > 2
        service.options = replace(service.options, most_context=9)
        with pytest.raises(RequestError) as long:
            asyncio.run(heard(service, GenerationRequest(prompt=tuple([5] * 10), max_tokens=2)))
        assert long.value.counts == {"n_prompt_tokens": 10, "n_ctx": 9}
        finished = asyncio.run(heard(service, GenerationRequest(prompt=tuple([5] * 8), max_tokens=9)))[-1]
        assert isinstance(finished, Finished) and finished.tokens == 2


def test_models_take_turns_and_idle_ones_go(served: Path, tmp_path: Path, expected: dict[str, str]) -> None:
    other = Path(shutil.copytree(served, tmp_path / "other"))
    broken = Path(shutil.copytree(served, tmp_path / "broken"))
    with serving(served, other, broken, keep_alive=0.3) as service:
        (broken / "model.safetensors").unlink()
        asks = [GenerationRequest(model=m, prompt=PROMPTS[0], max_tokens=6) for m in ("other", str(served), "other")]
        found = together(service, asks)
        assert [text_of(events) for events in found] == [expected[PROMPTS[0]]] * 3
        assert [e.model for events in found for e in events if isinstance(e, Begun)] == [
            "other", served.name, "other",
        ]  # fmt: skip
        with pytest.raises(RequestError):
            asyncio.run(heard(service, GenerationRequest(model="broken", prompt="a")))
        with pytest.raises(RequestError) as unknown:
            asyncio.run(heard(service, GenerationRequest(model="gpt-4", prompt="a")))
        assert unknown.value.status == 404
        card = asyncio.run(service.load("other", None))
        assert card.loaded and card.memory_bytes and card.expires_at is not None
        began = time.monotonic()
        while service.card("other").loaded and time.monotonic() < began + 20:
            time.sleep(0.02)
        assert not any(card.loaded for card in service.models()) and len(service.models()) == 3
        asyncio.run(service.load("other", -1))
        time.sleep(0.5)
        assert service.card("other").loaded
        assert not asyncio.run(service.load("other", 0)).loaded


def test_an_error_fails_its_requests_never_the_engine(served: Path, expected: dict[str, str]) -> None:
    with serving(served) as service:

        async def both() -> list[Any]:
            asks = [GenerationRequest(prompt=p, max_tokens=6) for p in PROMPTS[:2]]
            return await asyncio.gather(*(heard(service, ask) for ask in asks), return_exceptions=True)

        for where in ("step", "_run_pass"):
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(Scheduler, where, lambda *_: 1 / 0)
                assert all(isinstance(e, RequestError) and e.status == 500 for e in asyncio.run(both()))
            assert [text_of(events) for events in asyncio.run(both())] == [expected[p] for p in PROMPTS[:2]]
        service.close()
        with pytest.raises(RequestError) as late:
            asyncio.run(heard(service, GenerationRequest(prompt="a")))
        assert late.value.status == 503


def test_closing_ends_what_is_under_way(served: Path) -> None:
    with serving(served, max_tokens=100_000) as service:

        async def ended() -> RequestError:
            answer: AsyncIterator[Event] = service.answer(GenerationRequest(prompt=PROMPTS[1]))
            assert isinstance(answer, AsyncGenerator)
            async with aclosing(answer):
                with suppress(StopAsyncIteration):
                    assert isinstance(await anext(answer), Begun)
                    threading.Thread(target=service.close).start()
                    with pytest.raises(RequestError) as end:
                        async for _ in answer:
                            pass
                    return end.value
            raise AssertionError

        assert asyncio.run(ended()).status == 503
    assert not any("outcore" in t.name for t in threading.enumerate())
