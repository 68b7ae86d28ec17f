"""Prompts of many chunks on a server: others are answered between them, and who is not there any more costs nothing."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

import interrupts
import outcore
import zoo
from outcore.errors import RequestError
from outcore.options import LoadOptions
from outcore.serve.events import Begun, Event, Finished, GenerationRequest
from outcore.serve.service import ModelService, ServiceOptions
from outcore.serve.shelf import Shelf
from test_service import heard, text_of

CHUNK = 16
SHORT = GenerationRequest(prompt="def add(a, b):", max_tokens=6)
STREAM = GenerationRequest(prompt="import os\n", max_tokens=90)
MEMORY = {"resident": "400MB", "streamed": "12MB"}


def long(chunks: int, max_tokens: int = 4) -> GenerationRequest:
    """A prompt that is computed in so many chunks, and a last token."""
    return GenerationRequest(prompt=tuple(5 + i * 7 % 500 for i in range(chunks * CHUNK + 1)), max_tokens=max_tokens)


@contextmanager
def serving(
    folder: Path, memory: str = "resident", resident: int | None = None, **options: Any
) -> Iterator[ModelService]:
    """A service with the model in memory."""
    load = LoadOptions(
        memory=MEMORY.get(memory, memory), prefix_cache="off", context=128, dtype="float32", cpu_streams=1,
        govern=False, prefill_step_size=CHUNK, draft="none", resident=resident,
    )  # fmt: skip
    service = ModelService(Shelf([str(folder)]), ServiceOptions(load, **options))
    try:
        asyncio.run(service.load("", None))
        yield service
    finally:
        service.close()


@contextmanager
def passes(service: ModelService) -> Iterator[list[int]]:
    """Tokens of a sequence in each pass that is begun over the model meanwhile."""
    seen: list[int] = []
    assert service.engine.loaded is not None
    kinds = type(service.engine.loaded.model).__mro__
    kind: type[nn.Module] = next(k for k in kinds if "__call__" in vars(k) and not k.__module__.startswith("outcore"))
    call = kind.__call__

    def counted(self: nn.Module, ids: mx.array, *args: Any, **kwargs: Any) -> Any:
        seen.append(ids.shape[1])
        return call(self, ids, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kind, "__call__", counted)
        yield seen


async def until(condition: Any) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        await asyncio.sleep(0.001)


def test_a_prompt_whose_client_leaves_is_computed_no_further(served: Path) -> None:
    with serving(served) as service, passes(service) as seen:
        expected = text_of(asyncio.run(heard(service, SHORT)))

        async def leaves() -> int:
            del seen[:]
            task = asyncio.create_task(heard(service, long(100)))
            await until(lambda: len(seen) >= 3)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            left = len(seen)
            assert text_of(await heard(service, SHORT)) == expected
            return left

        assert asyncio.run(leaves()) < 50 and seen.count(CHUNK) < 60 and service.engine.running == 0


@pytest.mark.parametrize("memory", MEMORY)
def test_a_prompt_is_computed_no_further_when_the_server_ends(memory: str, served: Path) -> None:
    with serving(served, memory) as service:
        asyncio.run(heard(service, SHORT))
        began = time.monotonic()
        asyncio.run(heard(service, long(60, 1)))
        whole_s = time.monotonic() - began

        async def ends() -> float:
            task = asyncio.create_task(heard(service, long(120, 1)))
            await until(lambda: service.engine.running)
            await asyncio.sleep(whole_s / 4)
            began = time.monotonic()
            await asyncio.to_thread(service.close)
            with pytest.raises(RequestError, match="shutting down"):
                await task
            return time.monotonic() - began

        assert asyncio.run(ends()) < whole_s / 2 + 0.2


def test_a_streamed_prompt_that_nobody_wants_is_given_up_in_the_middle_of_a_sweep(served: Path) -> None:
    with serving(served, "streamed") as service:
        expected = text_of(asyncio.run(heard(service, SHORT)))
        began = time.monotonic()
        asyncio.run(heard(service, long(60, 1)))
        whole_s = time.monotonic() - began

        async def leaves() -> float:
            task = asyncio.create_task(heard(service, long(100, 1)))
            await until(lambda: service.engine.running)
            await asyncio.sleep(whole_s / 4)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            began = time.monotonic()
            assert text_of(await heard(service, SHORT)) == expected
            return time.monotonic() - began

        assert asyncio.run(leaves()) < whole_s + 0.5


def test_an_answer_has_a_token_after_each_chunk_of_anothers_prompt(served: Path) -> None:
    with serving(served) as service:
        alone = [text_of(asyncio.run(heard(service, ask))) for ask in (STREAM, long(15))]
        with passes(service) as seen:

            async def both() -> list[list[Event]]:
                stream = asyncio.create_task(heard(service, STREAM))
                await until(lambda: len(seen) > 5)
                return await asyncio.gather(stream, heard(service, long(15)))

            found = asyncio.run(both())
        assert [text_of(events) for events in found] == alone
        first, last = (f(i for i, n in enumerate(seen[5:]) if n == CHUNK) + 5 for f in (min, max))
        assert seen.count(CHUNK) == 15 and len(seen) > last + 20, "the answer went on behind it"
        runs = "".join("c" if n == CHUNK else " " for n in seen[first : last + 1]).split()
        assert max(map(len, runs)) <= 2


def test_an_answer_goes_on_while_anothers_prompt_is_streamed_for(served: Path) -> None:
    with serving(served, "streamed") as service:
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
        expected = [text_of(asyncio.run(heard(service, ask))) for ask in (SHORT, long(20))]
        ended: list[str] = []

        async def ask(name: str, what: GenerationRequest) -> str:
            text = text_of(await heard(service, what))
            ended.append(name)
            return text

        async def both() -> list[str]:
            first = asyncio.create_task(ask("long", long(20)))
            await until(lambda: service.engine.running)
            return [await ask("short", SHORT), await first]

        assert asyncio.run(both()) == expected and ended == ["short", "long"]


def test_long_prompts_are_computed_in_their_order(served: Path) -> None:
    """A prompt each in turn would have all of them begin at the end."""
    with serving(served) as service:
        begun: list[int] = []

        async def ask(number: int) -> float:
            async for event in service.answer(long(16)):
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
        assert seen.index(1) <= 16 + 1


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
    much = GenerationRequest(prompt=tuple(5 + i * 7 % 50 for i in range(1001)), max_tokens=60)

    with serving(folder, "9MB", 1) as service:
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
                    asyncio.run(heard(service, long(4)))
                assert error.value.status == 400 and error.value.counts == {"n_prompt_tokens": 65, "n_ctx": 64}
            else:
                finished = asyncio.run(heard(service, long(4, 90)))[-1]
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
