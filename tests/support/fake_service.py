"""A service without an engine, and an API without a world: the HTTP side of the server by itself."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from outcore.serve import prompting
from outcore.serve.access import Access
from outcore.serve.api import (
    Api,
    Defaults,
    HttpRequest,
    ParsedRequest,
    ResponseWriter,
    Route,
)
from outcore.serve.app import application
from outcore.serve.connection import ClientLimits
from outcore.serve.events import (
    Begun,
    Ended,
    Event,
    Finished,
    GenerationRequest,
    ModelCard,
    RequestError,
    TextPart,
)
from outcore.serve.server import Server, listen
from outcore.serve.site import Site

Script = Callable[[GenerationRequest], AsyncGenerator[Event, None]]


async def words(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    """The prompt, word by word."""
    said = str(ask.prompt).split()
    yield Begun("fake", len(said))
    for word in said:
        yield TextPart(0, word + " ")
    yield Ended(0, "stop", len(said))
    yield Finished(len(said), len(said))


class FakeService:
    """Answers by a script.

    Attributes:
        under_way: answers that were begun and are not over; ``closed``: that ended before their last event.
    """

    shelf = SimpleNamespace(named=lambda name: SimpleNamespace(name="demo", folder=Path("demo"), config={}))

    def __init__(self, script: Script = words) -> None:
        self.script = script
        self.under_way = 0
        self.closed = 0
        self.status = "ok"

    async def answer(self, *asks: GenerationRequest) -> AsyncGenerator[Event, None]:
        """As the script has it, one after the other."""
        self.under_way += 1
        ended = False
        try:
            for n, ask in enumerate(asks):
                async for event in self.script(ask):
                    if isinstance(event, Begun | Finished):
                        if n == (0 if isinstance(event, Begun) else len(asks) - 1):
                            yield event
                    else:
                        yield replace(event, index=event.index + n * ask.choices)
            ended = True
        except RequestError:
            ended = True
            raise
        finally:
            self.under_way -= 1
            self.closed += not ended

    async def prompt(self, ask: GenerationRequest) -> prompting.Prompt:
        """A token for each of its words."""
        return prompting.Prompt(tuple(range(len(str(ask.prompt).split()))), cast(Any, None))

    def models(self) -> Sequence[ModelCard]:
        """One."""
        return [ModelCard("fake", loaded=True)]

    def card(self, name: str) -> ModelCard:
        """That one."""
        if name != "fake":
            raise RequestError(f"no model {name!r}", "model_not_found", status=404)
        return self.models()[0]

    async def load(self, name: str, keep_alive: float | None) -> ModelCard:
        """It is loaded."""
        return self.card(name)

    def state(self) -> Mapping[str, Any]:
        """What it does."""
        counters = {"sweeps": 7, "bytes_read": 700, "tokens": 70, "drafted": 9, "accepted": 3, "memory_bytes": 1000}
        return {"status": self.status, "running": self.under_way, "waiting": 0, "models": {"fake": counters}}


class FakeAnswering(ResponseWriter):
    """Sends pieces as server-sent events, or all of them at once."""

    def __init__(self, body: Mapping[str, Any]) -> None:
        super().__init__(bool(body.get("stream")), [str(key) for key in body if key not in ("stream", "prompt")])

    def steps(self, event: Event) -> list[Any]:
        return [event.text] if isinstance(event, TextPart) else []

    def closing(self) -> bytes:
        return b"data: [DONE]\n\n"

    def failure(self, error: RequestError, body: dict[str, Any]) -> list[Any]:
        return [{"error": str(error)}]

    def keepalive(self) -> bytes:
        return b": still here\n\n"

    def whole(self, events: Sequence[Event]) -> dict[str, Any]:
        return {"text": "".join(e.text for e in events if isinstance(e, TextPart))}


def parse(request: HttpRequest) -> ParsedRequest:
    """A prompt is all that there is to ask."""
    prompt = request.body.get("prompt")
    if not isinstance(prompt, str):
        raise RequestError("prompt: a text is needed", param="prompt")
    if prompt == "crash":
        raise ZeroDivisionError("a bug")
    asked = GenerationRequest(prompt=prompt, model=request.body.get("model", ""))
    return ParsedRequest((asked,), FakeAnswering(request.body))


def listed(request: HttpRequest) -> dict[str, Any]:
    """The names of models."""
    return {"models": [card.name for card in request.service.models()]}


def shown(request: HttpRequest) -> dict[str, Any]:
    """One model."""
    return {"model": request.service.card(request.params["model"]).name}


async def listed_otherwise() -> dict[str, Any]:
    """Another family's list at the same address."""
    return {"otherwise": True}


ONE = Api(
    "one",
    lambda error: {"error": {"message": str(error), "code": error.code}},
    (
        Route("/v1/say", parse, "POST"),
        Route("/v1/models", listed),
        Route("/v1/models/{model:path}", shown),
    ),
)
OTHER = Api(
    "other",
    lambda error: {"type": "error", "told": str(error)},
    (Route("/v1/messages", parse, "POST"), Route("/v1/models", lambda request: listed_otherwise())),
    header="other-version",
)
THIRD = Api("third", lambda error: {"error": str(error)}, (Route("/api/say", parse, "POST"),))
APIS = (ONE, OTHER, THIRD)


class Clock:
    """Seconds that pass when they are told to, but for a little with every look."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1e-6
        return self.now


@dataclass
class Running:
    """A server under test.

    Attributes:
        clock: by which clients are late. ``raised``: what asyncio would have logged.
    """

    service: FakeService
    site: Site
    server: Server
    clock: Clock
    port: int
    raised: list[Mapping[str, Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where it is."""
        return f"http://127.0.0.1:{self.port}"

    async def look(self, later_s: float = 0.0) -> None:
        """Let seconds pass by the clock, and the server see who is late."""
        # What was sent until now comes before.
        await asyncio.sleep(0.05)
        self.clock.now += later_s
        self.server.look()
        await asyncio.sleep(0.05)


@asynccontextmanager
async def running(
    script: Script = words,
    limits: ClientLimits | None = None,
    access: Access | None = None,
    *,
    drain_s: float = 1.0,
    defaults: Defaults | None = None,
) -> AsyncIterator[Running]:
    """A server on a free port, in this loop."""
    service, clock = FakeService(script), Clock()
    site = Site(cast(Any, service), APIS, limits, defaults, clock)
    ready = asyncio.Event()
    server = Server(application(site, access), site, drain_s, ready.set)
    sockets = listen("127.0.0.1", 0)
    port = sockets[0].getsockname()[1]
    raised: list[Mapping[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    task = asyncio.create_task(server.serve(sockets))
    try:
        await asyncio.wait_for(ready.wait(), 20)
        yield Running(service, site, server, clock, port, raised)
    finally:
        server.should_exit = True
        await asyncio.wait_for(task, 30)


async def exchange(port: int, data: bytes, *, end: bool = False) -> bytes:
    """What a server sends for some bytes until it closes the connection.

    Args:
        end: tell it that nothing more will come.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if end:
            writer.write_eof()
        return await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()


def posted(path: str, body: object, *, headers: str = "", close: bool = True) -> bytes:
    """A POST request as it goes over the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n{headers}"
    return (head + "connection: close\r\n" * close + "\r\n").encode() + data
