"""Prompts of many chunks on a server: others are answered between them, and who is not there any more costs nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import interrupts
import outcore
import zoo
from outcore.engine.session import Session
from outcore.errors import RequestError
from outcore.options import LoadOptions
from outcore.serve.events import Begun, Event, Finished, GenerationRequest
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from test_service import heard, text_of

CHUNK = 4
SHORT = GenerationRequest(prompt=(8, 9, 7), max_tokens=4)
STREAM = GenerationRequest(prompt=(5, 6, 7), max_tokens=30)
STAYS = {"resident": None, "streamed": 0}


@pytest.fixture(scope="module")
def served(quick_models: Callable[[int], Path]) -> Path:
    """Four layers, two of them recurrent."""
    return quick_models(4)


def long(chunks: int, max_tokens: int = 4) -> GenerationRequest:
    """A prompt that is computed in so many chunks, and a last token."""
    return GenerationRequest(prompt=tuple(5 + i * 7 % 500 for i in range(chunks * CHUNK + 1)), max_tokens=max_tokens)


@contextmanager
def serving(
    folder: Path, resident: int | None = None, memory: str = "400MB", chunk: int = CHUNK, **options: Any
) -> Iterator[ModelService]:
    """A service with the model loaded, all of it or so many layers."""
    load = LoadOptions(
        memory=memory, prefix_cache="off", context=128, dtype="float32", cpu_streams=1,
        govern=False, prefill_step_size=chunk, draft="none", resident=resident,
    )  # fmt: skip
    service = ModelService(Shelf([str(folder)]), ServiceOptions(load, **options))
    try:
        asyncio.run(service.load("", None))
        assert session_of(service).plan.streams == (resident is not None)
        yield service
    finally:
        service.close()


def session_of(service: ModelService) -> Session:
    assert service.engine.loaded is not None
    return service.engine.loaded.session


@contextmanager
def passes(service: ModelService, call_after: Callable[[], object] = int) -> Iterator[list[int]]:
    """Tokens of a sequence in each pass that is begun over the model meanwhile."""
    seen: list[int] = []
    assert service.engine.loaded is not None
    kinds = type(service.engine.loaded.model).__mro__
    kind: type[nn.Module] = next(k for k in kinds if "__call__" in vars(k) and not k.__module__.startswith("outcore"))
    call = kind.__call__

    def counted(self: nn.Module, ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        found = call(self, ids, *args, **kwargs)
        call_after()
        return found

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "__call__", counted)
        yield seen


@contextmanager
def units(service: ModelService, call_after: Callable[[], object]) -> Iterator[None]:
    """Calls a function after each streamed unit, before the engine asks whether to go on."""
    streaming = session_of(service).streaming
    assert streaming is not None
    streaming.after_unit.insert(0, call_after)
    yield
    streaming.after_unit.remove(call_after)


async def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("stays", STAYS)
def test_a_prompt_is_computed_no_further_when_its_client_leaves_or_the_server_ends(stays: str, served: Path) -> None:
    """Not the next chunk of a model in memory, and not the next layer of one that is streamed."""
    with serving(served, STAYS[stays]) as service:
        expected = text_of(asyncio.run(heard(service, SHORT)))

        async def interrupted(end: Callable[[asyncio.Task[Any]], object], ended: Callable[[], bool]) -> None:
            done = 0

            def third() -> None:
                nonlocal done
                done += 1
                if done == 3:
                    loop.call_soon_threadsafe(end, task)
                    until_true = time.monotonic() + 60
                    while not ended() and time.monotonic() < until_true:
                        time.sleep(0.001)

            loop = asyncio.get_running_loop()
            with passes(service, third) if stays == "resident" else units(service, third):
                task = asyncio.create_task(heard(service, long(20)))
                with pytest.raises((RequestError, asyncio.CancelledError)) as raised:
                    await task
                await until(lambda: service.engine.running == 0)
            assert done == 3 and (raised.type is asyncio.CancelledError or "shutting down" in str(raised.value))

        async def leaves() -> None:
            await interrupted(lambda task: task.cancel(), lambda: not wanted())
            assert text_of(await heard(service, SHORT)) == expected

        def wanted() -> bool:
            return any(choice.wanted for choice in list(service.engine._choices.values()))

        async def ends() -> None:
            closing = threading.Thread(target=service.close)
            await interrupted(lambda _: closing.start(), lambda: service.engine._closing)
            await asyncio.to_thread(closing.join)

        asyncio.run(leaves())
        asyncio.run(ends())


def test_an_answer_has_a_token_after_each_chunk_of_anothers_prompt(served: Path) -> None:
    with serving(served) as service:
        alone = [text_of(asyncio.run(heard(service, ask))) for ask in (STREAM, long(8))]
        with passes(service) as seen:

            async def both() -> list[list[Event]]:
                stream = asyncio.create_task(heard(service, STREAM))
                await until(lambda: len(seen) > 5)
                return await asyncio.gather(stream, heard(service, long(8)))

            found = asyncio.run(both())
        assert [text_of(events) for events in found] == alone
        first, last = (f(i for i, n in enumerate(seen[5:]) if n == CHUNK) + 5 for f in (min, max))
        assert seen.count(CHUNK) == 8 and len(seen) > last + 5, "the answer went on behind it"
        runs = "".join("c" if n == CHUNK else " " for n in seen[first : last + 1]).split()
        assert max(map(len, runs)) <= 2


def test_an_answer_goes_on_while_anothers_prompt_is_streamed_for(served: Path) -> None:
    with serving(served, 0) as service:
        alone = [text_of(asyncio.run(heard(service, ask))) for ask in (STREAM, long(24))]
        with passes(service) as seen:

            async def both() -> list[list[Event]]:
                stream = asyncio.create_task(heard(service, STREAM))
                await until(lambda: len(seen) > 5)
                return await asyncio.gather(stream, heard(service, long(24)))

            found = asyncio.run(both())
        assert [text_of(events) for events in found] == alone
        first, last = (f(i for i, n in enumerate(seen[5:]) if n == CHUNK) + 5 for f in (min, max))
        assert seen.count(CHUNK) == 24 and seen[first:last].count(1) >= 3


def test_a_short_prompt_does_not_wait_for_a_long_one(served: Path) -> None:
    with serving(served) as service:
        expected = [text_of(asyncio.run(heard(service, ask))) for ask in (SHORT, long(12))]
        ended: list[str] = []

        async def ask(name: str, what: GenerationRequest) -> str:
            text = text_of(await heard(service, what))
            ended.append(name)
            return text

        async def both() -> list[str]:
            first = asyncio.create_task(ask("long", long(12)))
            await until(lambda: service.engine.running)
            return [await ask("short", SHORT), await first]

        assert asyncio.run(both()) == expected and ended == ["short", "long"]


def test_long_prompts_are_computed_in_their_order(served: Path) -> None:
    """A prompt each in turn would have all of them begin at the end."""
    with serving(served) as service:
        begun: list[int] = []

        async def ask(number: int) -> float:
            async for event in service.answer(long(6)):
                begun.extend([number] * isinstance(event, Begun))
                if isinstance(event, Finished):
                    return event.queued_s
            raise AssertionError

        async def all_of_them() -> None:
            go = threading.Event()
            service.engine.call(go.wait)
            tasks = [asyncio.create_task(ask(i)) for i in range(3)]
            await until(lambda: service.engine.waiting == 3)
            go.set()
            await asyncio.gather(*tasks)

        with passes(service) as seen:
            asyncio.run(all_of_them())
        assert begun == [0, 1, 2]
        # The first is answered when its own prompt is computed, not all three.
        assert seen.index(1) <= 6 + 1


def test_others_have_room_beside_a_text_that_is_much_longer(
    tmp_path: Path, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Padded to its length they have none."""
    positions = zoo.CONFIGS["llama"] | {"max_position_embeddings": 4096, "num_key_value_heads": 4}
    monkeypatch.setitem(zoo.CONFIGS, "llama", positions)
    folder = zoo.save_checkpoint("llama", tmp_path / "model")
    shutil.copy(demo_model / "tokenizer.json", folder)
    (folder / "tokenizer_config.json").write_text((demo_model / "tokenizer_config.json").read_text())
    short = GenerationRequest(prompt=(5, 6, 7), max_tokens=4)
    much = GenerationRequest(prompt=tuple(5 + i * 7 % 50 for i in range(1001)), max_tokens=16)

    with serving(folder, 1, "9MB", 64) as service:
        alone = [text_of(asyncio.run(heard(service, ask))) for ask in (short, much)]

        async def short_ones() -> None:
            stream = asyncio.create_task(heard(service, replace(short, max_tokens=300)))
            await until(lambda: service.engine.running)
            with pytest.raises(RequestError, match=r"4000 tokens: .*does not fit into"):
                await heard(service, replace(much, prompt=much.prompt * 3 + much.prompt[:997]))
            assert not stream.done(), "what never fits need not wait for others"
            stream.cancel()
            long = asyncio.create_task(heard(service, much))
            await until(lambda: service.engine.running)
            assert text_of(await heard(service, short)) == alone[0]
            assert not long.done(), "its prompt was computed meanwhile"
            assert text_of(await long) == alone[1]
            events = list[Event]()
            async for event in service.answer(much):
                events.append(event)
                if len(events) == 3:
                    assert text_of(await heard(service, short)) == alone[0]
                    running = service.engine.running
            assert running and text_of(events) == alone[1]

        asyncio.run(short_ones())


def test_prompts_are_no_longer_than_the_model_was_made_for(served: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(served, tmp_path / "made-for-64"))
    config = json.loads((folder / "config.json").read_text())
    (config.get("text_config") or config)["max_position_embeddings"] = 64
    (folder / "config.json").write_text(json.dumps(config))
    for most, refused in ((None, True), (96, False)):
        with serving(folder, most_context=most) as service:
            if refused:
                with pytest.raises(RequestError) as error:
                    asyncio.run(heard(service, long(16)))
                assert error.value.status == 400 and error.value.counts == {"n_prompt_tokens": 65, "n_ctx": 64}
            else:
                finished = asyncio.run(heard(service, long(16, 90)))[-1]
                assert isinstance(finished, Finished) and finished.tokens == 96 - 65 + 1


def test_ctrl_c_in_a_prompt_of_a_model_in_memory_is_heard_behind_a_chunk(served: Path) -> None:
    model, tokenizer = outcore.load(str(served), memory="400MB", prefill_step_size=CHUNK, draft="none", govern=False)
    seen: list[int] = []
    call = type(model).__call__

    def counted(self: nn.Module, ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        if len(seen) == 3:
            signal.raise_signal(signal.SIGINT)
        return call(self, ids, *args, **kwargs)

    with model.outcore, interrupts.heard(), pytest.MonkeyPatch.context() as patched:
        patched.setattr(type(model), "__call__", counted)
        with pytest.raises(KeyboardInterrupt):
            outcore.generate(model, tokenizer, list(long(100).prompt), max_tokens=2)  # type: ignore[arg-type]
    assert len(seen) <= 4
