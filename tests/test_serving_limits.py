"""Clients that are late, gone, too many or too much: what each may take of the server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncGenerator, Callable

import pytest

from fake_service import Running, exchange, posted, running
from hostile_bodies import bodies
from outcore.serve.connection import ClientLimits
from outcore.serve.events import Begun, Event, Finished, GenerationRequest, RequestError, TextPart
from outcore.serve.requests import read_json

PIECE = "x" * 50_000


async def endless(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    """Pieces without end, more of them than any socket holds."""
    yield Begun("fake", 1)
    while True:
        yield TextPart(0, PIECE if ask.prompt == "much" else ".")
        await asyncio.sleep(0.005)


async def silent(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    """Nothing, for long."""
    await asyncio.sleep(3600)
    yield Begun("fake", 1)


async def until(condition: Callable[[], bool], most_s: float = 20.0) -> float:
    """Wait for something to become so; the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < most_s, "it did not become so"
        await asyncio.sleep(0.01)
    return time.monotonic() - began


async def works(server: Running) -> None:
    """The next answer is right, and nothing is left of those before."""
    answer = await exchange(server.port, posted("/v1/say", {"prompt": "all is well"}))
    assert answer.endswith(b'{"text":"all is well "}'), answer
    await until(lambda: not server.server.server_state.connections)
    assert (server.service.under_way, server.site.under_way, server.site.held_bytes) == (0, 0, 0)
    assert not server.raised


HEAD = b"POST /v1/say HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\n"

CHUNKED = HEAD.replace(b"content-length: 1000", b"transfer-encoding: chunked") + b"\r\n5\r\n{"
LATE = {
    "nothing at all": (b"", 75, b""),
    "half a request line": (b"POST /v1/s", 10, b"HTTP/1.1 408 "),
    "half of the headers": (HEAD, 10, b"HTTP/1.1 408 "),
    "no body": (HEAD + b"\r\n", 30, b"HTTP/1.1 408 "),
    "half of a body": (HEAD + b'\r\n{"prompt', 30, b"HTTP/1.1 408 "),
    "a chunk that does not end": (CHUNKED, 30, b"HTTP/1.1 408 "),
    "a whole request, then nothing": (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", 75, b"HTTP/1.1 200 "),
    "a whole request, then half of one": (
        b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he", 10, b"HTTP/1.1 200 "
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LATE)
def test_a_client_that_is_late_gets_an_answer_and_closed(name: str) -> None:
    sent, allowed_s, wanted = LATE[name]

    async def test() -> None:
        async with running() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(sent)
            answer = asyncio.create_task(reader.read())
            await server.look(allowed_s - 1)
            # More of it, drop by drop, gives no more time.
            if wanted and not name.endswith("nothing"):
                writer.write(b"x")
            await server.look(0.9)
            assert not answer.done()
            await server.look(0.2)
            data = await asyncio.wait_for(answer, 20)
            writer.close()
            assert data.startswith(wanted) and bool(data) is bool(wanted), data
            if b"408" in wanted:
                assert json.loads(data.partition(b"\r\n\r\n")[2])["error"]["message"]
            await works(server)

    asyncio.run(test())


def test_a_client_that_goes_on_after_its_error_is_cut_off() -> None:
    async def test() -> None:
        async with running() as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(HEAD)
            await server.look(11)
            assert (await asyncio.wait_for(reader.read(), 20)).startswith(b"HTTP/1.1 408 ")
            for _ in range(4):
                writer.write(b"x" * 100)
                await server.look(1)
            assert len(server.server.server_state.connections) == 1
            await server.look(2)
            assert not server.server.server_state.connections
            writer.close()
            await works(server)

    asyncio.run(test())


def test_a_large_body_has_the_time_that_it_takes() -> None:
    async def test() -> None:
        async with running(limits=ClientLimits(body_s=30, body_rate=1000)) as server:
            request = posted("/v1/say", {"prompt": "x" * 100_000})
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            for at in range(0, len(request), 20_000):
                writer.write(request[at : at + 20_000])
                await server.look(20)
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
            writer.close()
            await works(server)

    asyncio.run(test())


def test_bodies_and_headers_that_are_too_large_are_refused() -> None:
    async def test() -> None:
        async with running(limits=ClientLimits(body_bytes=10_000)) as server:
            large = posted("/v1/say", {"prompt": "x" * 10_000})
            declared = await exchange(server.port, large.partition(b"\r\n\r\n")[0] + b"\r\n\r\n")
            assert declared.startswith(b"HTTP/1.1 413 ")
            chunk = b"2710\r\n" + b"x" * 10_000 + b"\r\n"
            head = b"POST /v1/say HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
            late = asyncio.create_task(exchange(server.port, head + chunk + chunk[:100]))
            await server.look(4)
            assert not late.done()  # the rest is waited for, so that the answer is not lost
            await server.look(2)
            assert (await late).startswith(b"HTTP/1.1 413 ")
            long = b"GET / HTTP/1.1\r\nhost: localhost\r\nx: " + b"x" * 400_000
            assert (await exchange(server.port, long)).startswith(b"HTTP/1.1 431 ")
            # Bodies that each are small enough are too much together; the first are read.
            half = posted("/v1/say", {"prompt": "x" * 9_000})
            several = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
            for _, writer in several:
                writer.write(half[:-1])
            await until(lambda: server.site.held_bytes > 36_000)
            second = await exchange(server.port, half)
            assert second.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1\r\n" in second
            for reader, writer in several:
                writer.write(half[-1:])
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
                writer.close()
            await works(server)

    asyncio.run(test())


def test_beyond_the_limit_whoever_has_waited_longest_makes_room() -> None:
    async def test() -> None:
        async with running(endless, ClientLimits(connections=4)) as server:
            busy = await asyncio.open_connection("127.0.0.1", server.port)
            busy[1].write(posted("/v1/say", {"prompt": "a", "stream": True}))
            await busy[0].readuntil(b"data")
            idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
            await until(lambda: len(server.server.server_state.connections) == 4)
            for _ in range(3):
                assert b'"status":"ok"' in await exchange(server.port, b"GET /health HTTP/1.0\r\n\r\n")
            assert await idle[0][0].read() == b""
            assert server.site.dropped >= 1
            for _, writer in idle:
                writer.close()
            # Four answers under way: none of them makes room.
            more = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(3)]
            for reader, writer in more:
                writer.write(posted("/v1/say", {"prompt": "a", "stream": True}))
                await reader.readuntil(b"data")
            turned_away = await exchange(server.port, b"")
            assert turned_away.startswith(b"HTTP/1.1 503 ") and b"retry-after" in turned_away
            for reader, writer in (busy, *more):
                await reader.readuntil(b"data")
                writer.close()
            await until(lambda: server.service.under_way == 0)
            assert b'"status":"ok"' in await exchange(server.port, b"GET /health HTTP/1.0\r\n\r\n")
            assert not server.raised

    asyncio.run(test())


def test_a_thousand_silent_connections_keep_no_client_out() -> None:
    async def test() -> None:
        async with running(limits=ClientLimits(connections=64)) as server:
            held: list[socket.socket] = []
            slowest = 0.0
            try:
                for n in range(1000):
                    one = socket.create_connection(("127.0.0.1", server.port))
                    one.send(b"GET / HTTP/1.1\r\nhost: lo"[: n % 25])
                    held.append(one)
                    if n % 50 == 0:
                        began = time.monotonic()
                        assert b'"status":"ok"' in await exchange(server.port, b"GET /health HTTP/1.0\r\n\r\n")
                        slowest = max(slowest, time.monotonic() - began)
                        assert len(server.server.server_state.connections) <= 64
            finally:
                for one in held:
                    one.close()
            assert slowest < 1, slowest
            await works(server)

    asyncio.run(test())


@pytest.mark.parametrize("prompt", ["few", "much"])
def test_an_answer_ends_when_its_client_goes(prompt: str) -> None:
    async def test() -> None:
        async with running(endless) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(posted("/v1/say", {"prompt": prompt, "stream": True}))
            await reader.readuntil(b"data")
            assert server.service.under_way == 1
            writer.transport.abort()
            assert await until(lambda: server.service.under_way == 0) < 2
            assert server.service.closed == 1
            await until(lambda: not server.server.server_state.connections)
            assert not server.raised

    asyncio.run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_an_answer_that_has_not_begun_ends_when_its_client_goes(stream: bool) -> None:
    async def test() -> None:
        async with running(silent) as server:
            _, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(posted("/v1/say", {"prompt": "a", "stream": stream}))
            await until(lambda: server.service.under_way == 1)
            writer.close()
            assert await until(lambda: server.service.under_way == 0) < 2
            await until(lambda: not server.server.server_state.connections)
            assert not server.raised

    asyncio.run(test())


def unread(port: int) -> socket.socket:
    """A client that takes little, and reads nothing."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_never_reads_loses_its_connection(stream: bool) -> None:
    async def much(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("fake", 1)
        for _ in range(200):
            yield TextPart(0, PIECE)
        yield Finished(1, 200)

    async def test() -> None:
        async with running(endless if stream else much) as server:
            client = unread(server.port)
            client.sendall(posted("/v1/say", {"prompt": "much", "stream": stream}))
            await until(lambda: any(c.full for c in server.server.server_state.connections))
            await server.look()
            await server.look(29)
            assert server.site.late == 0
            await server.look(2)
            assert server.site.late == 1
            await until(lambda: server.service.under_way == 0 and not server.server.server_state.connections)
            assert not server.raised
            client.close()

    asyncio.run(test())


def test_hostile_bodies_are_answered_and_change_nothing() -> None:
    async def test() -> None:
        async with running(limits=ClientLimits(body_bytes=60_000, values=20_000)) as server:
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            seen: set[int] = set()
            for body in bodies(16, 500):
                writer.write(posted("/v1/say", body, close=False))
                head = await reader.readuntil(b"\r\n\r\n")
                status = int(head.split()[1])
                length = [line for line in head.split(b"\r\n") if line.startswith(b"content-length")]
                if length:
                    answer = json.loads(await reader.readexactly(int(length[0].split()[1])))
                    assert (status == 200) is ("text" in answer) and (status == 200) is not ("error" in answer)
                else:
                    assert status == 200
                    await reader.readuntil(b"\r\n0\r\n\r\n")
                seen.add(status)
            # Such as were changed and are right all the same among them.
            assert seen == {200, 400, 413}
            writer.close()
            await works(server)

    asyncio.run(test())


def test_what_is_not_http_is_refused_and_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with running() as server:
            rng = random.Random(3)
            lines = [rng.randbytes(200) + b"\r\n\r\n" for _ in range(20)]
            lines += [
                b"GET / HTTP/x\r\n\r\n",
                b"GET  /\r\n\r\n",
                b"GET / HTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01",
            ]
            lines += [b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: -1\r\n\r\n", b"\r\n" * 20_000]
            lines += [b"GET / HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade, close\r\nupgrade: x\r\nx\r\n\r\n"]
            lines += [b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n"]
            for line in lines:
                answer = await exchange(server.port, line, end=True)
                assert not answer or answer.split()[1] in (b"400", b"431", b"403", b"501", b"505"), (line, answer)
            await works(server)
            assert not caplog.records

    asyncio.run(test())


def test_a_body_is_json_in_utf8_finite_and_not_too_deep() -> None:
    assert read_json(b"") == read_json(b" \r\n") == {}
    assert read_json(b'\xef\xbb\xbf{"a": [1, 1e30, "\xc3\xa9"]}') == {"a": [1, 1e30, "é"]}
    for depth, fits in ((99, True), (100, False), (150, False), (70_000, False)):
        body = b'{"a": ' + b"[" * depth + b"]" * depth + b"}"
        if fits:
            assert read_json(body)
            continue
        with pytest.raises(RequestError):
            read_json(body)
    refused = {
        b'{"a": NaN}': "not JSON",
        b'{"a": -Infinity}': "not JSON",
        b'{"a": 1e999}': "too large",
        b'{"a": {"b": [1, ' + b"9" * 400 + b".0]}}": "too large",
        b'{"a": "\xff"}': "not JSON in UTF-8",
        b'{"a": "\\ud800"}': "not JSON in UTF-8",
        b'{"a": ' + b"1" * 70_000 + b"}": "not JSON in UTF-8",
        '{"a": 1}'.encode("utf-16"): "not JSON in UTF-8",
        b"[1]": "not a JSON object",
        b'{"a": 1} b': "not JSON",
    }
    for body, why in refused.items():
        with pytest.raises(RequestError, match=why) as told:
            read_json(body)
        assert told.value.status == 400
    with pytest.raises(RequestError) as told:
        read_json(b'{"a": [' + b"1," * 60 + b"1]}", 60)
    assert told.value.status == 413
