"""What the server answers: addresses, streams, errors in each API's words, who may ask, and how it ends."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncGenerator, Mapping

import httpx
import pytest

from fake_service import Running, exchange, posted, running
from outcore.errors import OutcoreError, UsageError
from outcore.serve.access import Access, local_names
from outcore.serve.connection import ClientLimits
from outcore.serve.events import Begun, Event, Finished, GenerationRequest, RequestError, TextPart
from outcore.serve.server import listen, url

Given = Mapping[str, str]


async def ask(server: Running, method: str, path: str, headers: Given | None = None, **body: object) -> httpx.Response:
    """A request, and all of its answer."""
    async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
        return await client.request(method, path, headers=headers, json=body or None)


def test_an_answer_comes_whole_or_as_a_stream() -> None:
    async def test() -> None:
        async with running() as server:
            whole = await ask(server, "POST", "/v1/say", prompt="a b")
            assert (whole.status_code, whole.json()) == (200, {"text": "a b "})
            stream = await ask(server, "POST", "/v1/say", prompt="a b", stream=True, odd=1)
            assert stream.text == 'data: "a "\n\ndata: "b "\n\ndata: [DONE]\n\n'
            assert stream.headers["content-type"].startswith("text/event-stream")
            assert stream.headers["cache-control"] == "no-cache"
            assert stream.headers["x-outcore-ignored"] == "odd" and "x-outcore-ignored" not in whole.headers
            hostile = await ask(server, "POST", "/v1/say", **{"prompt": "a", "x\r\nset-cookie: é": 1, "b" * 1000: 2})
            assert hostile.headers["x-outcore-ignored"] == "x%0D%0Aset-cookie%3A%20%C3%A9, " + "b" * 60
            connection = await asyncio.open_connection("127.0.0.1", server.port)
            await asyncio.sleep(0.05)
            (served,) = server.server.server_state.connections
            nodelay = served.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert nodelay, "each answer would wait for 40 ms"
            connection[1].close()

    asyncio.run(test())


def test_the_journal_has_a_line_for_each_request_to_a_model_and_each_refused_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def script(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("fake", 5, cached_tokens=3)
        yield TextPart(0, "so far")
        if ask.prompt == "fail":
            raise RequestError("no more", "x", status=500)
        if ask.prompt == "long":
            await asyncio.sleep(60)
        yield Finished(5, 9, 3, generation_s=2.0)

    async def test() -> list[str]:
        async with running(script) as server:
            lines: list[str] = []
            server.site.journal = lines.append
            await ask(server, "POST", "/v1/say", prompt="a", model="gpt-4o")
            await ask(server, "GET", "/v1/models")
            await ask(server, "GET", "/no%0Away")
            await ask(server, "POST", "/v1/say")
            await ask(server, "GET", "/", {"host": "evil.example"})
            await ask(server, "POST", "/v1/say", prompt="fail", stream=True)
            with pytest.raises(httpx.ReadTimeout):
                async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=0.2) as client:
                    await client.post("/v1/say", json={"prompt": "long"})
            await server.look()
            caplog.set_level("INFO", "outcore")
            await ask(server, "GET", "/v1/models")
            return lines

    lines = asyncio.run(test())
    assert all(re.fullmatch(r"[-\d]{10} [:\d]{8}  127\.0\.0\.1  .*", line) for line in lines)
    assert [line.split("  ", 2)[2] for line in lines] == [
        "fake for gpt-4o  in 5  cached 3  out 9  4.00 tok/s  200 POST /v1/say",
        "404 GET /no way  no such address",
        "400 POST /v1/say  prompt: a text is needed",
        "403 GET /  the host name 'evil.example' is not allowed; add it with --allowed-hosts",
        "fake  in 5  cached 3  failed POST /v1/say",
        "fake  in 5  cached 3  client left POST /v1/say",
        "200 GET /v1/models",
    ]


def test_addresses_of_all_families_and_of_none() -> None:
    async def test() -> None:
        async with running() as server:
            assert (await ask(server, "GET", "/")).text == "Outcore is running"
            head = await ask(server, "HEAD", "/")
            assert (head.status_code, head.content) == (200, b"")
            health = await ask(server, "GET", "/health")
            assert health.json() == {"status": "ok", "running": 0, "waiting": 0}
            listed = await ask(server, "GET", "/v1/models?limit=3")
            assert listed.json() == {"models": ["fake"]}
            # Two families have this address; a header says which is meant.
            assert (await ask(server, "GET", "/v1/models", {"Other-Version": "1"})).json() == {"otherwise": True}
            assert (await ask(server, "GET", "/v1/models/fake")).json() == {"model": "fake"}
            assert (await ask(server, "GET", "/v1/models/a/b")).status_code == 404

    asyncio.run(test())


def test_errors_are_reported_in_the_words_of_the_family() -> None:
    async def test() -> None:
        async with running() as server:
            meant = ", did you mean /v1/messages?"
            told = {
                ("POST", "/v1/v1/messages"): (
                    404,
                    {"error": {"message": f"/v1/v1/messages: no such address{meant}", "code": "not_found"}},
                ),
                ("GET", "/nope"): (404, {"error": {"message": "/nope: no such address", "code": "not_found"}}),
                ("GET", "/v1/nope"): (404, {"error": {"message": "/v1/nope: no such address", "code": "not_found"}}),
                ("GET", "/api/nope"): (404, {"error": "/api/nope: no such address"}),
                ("POST", "/v1/messages/x"): (404, {"type": "error", "told": f"/v1/messages/x: no such address{meant}"}),
                ("POST", "/v1/messages/"): (404, {"type": "error", "told": f"/v1/messages/: no such address{meant}"}),
                ("GET", "/v1/messages"): (405, {"type": "error", "told": "/v1/messages: GET is not allowed, use POST"}),
                ("POST", "/api/say"): (400, {"error": "prompt: a text is needed"}),
            }
            for (method, path), wanted in told.items():
                answer = await ask(server, method, path)
                assert (answer.status_code, answer.json()) == wanted, path
            assert (await ask(server, "GET", "/v1/messages")).headers["allow"] == "POST"
            otherwise = await ask(server, "GET", "/v1/nope", {"other-version": "1"})
            assert otherwise.json() == {"type": "error", "told": "/v1/nope: no such address"}

    asyncio.run(test())


def test_a_bug_fails_its_request_alone_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def bad(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("fake", 1)
        if ask.prompt != "at once":
            yield TextPart(0, "so far")
            await asyncio.sleep(0.05)
        raise ZeroDivisionError("a bug")

    async def test() -> None:
        async with running(bad) as server:
            for prompt in ("crash", "at once", "later"):
                answer = await ask(server, "POST", "/v1/say", prompt=prompt)
                assert answer.status_code == 500 and answer.json()["error"]["code"] == "internal_error"
                assert "ZeroDivisionError: a bug" in caplog.text and "a bug" not in answer.text
                caplog.clear()
            stream = await ask(server, "POST", "/v1/say", prompt="later", stream=True)
            assert stream.status_code == 200 and stream.text.startswith('data: "so far"\n\ndata: {"error":')
            assert stream.text.endswith("\n\n") and "DONE" not in stream.text
            assert "ZeroDivisionError: a bug" in caplog.text
            assert (await ask(server, "GET", "/health")).json()["running"] == 0

    asyncio.run(test())


def test_a_stream_says_that_it_lives_until_there_is_something_to_say() -> None:
    async def slow(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        await asyncio.sleep(0.25)
        yield Begun("fake", 1)
        yield TextPart(0, "a")
        await asyncio.sleep(0.25)
        if ask.prompt == "fails":
            raise RequestError("no memory left", status=503)
        yield TextPart(0, "b")

    async def test() -> None:
        async with running(slow, ClientLimits(keepalive_s=0.1)) as server:
            right = await ask(server, "POST", "/v1/say", prompt="x", stream=True)
            before, _, after = right.text.partition('data: "a"\n\n')
            assert before.count(": still here\n\n") >= 1 and after.count(": still here\n\n") >= 1
            assert right.text.replace(": still here\n\n", "") == 'data: "a"\n\ndata: "b"\n\ndata: [DONE]\n\n'
            failed = await ask(server, "POST", "/v1/say", prompt="fails", stream=True)
            assert failed.status_code == 200 and failed.text.endswith('data: {"error":"no memory left"}\n\n')
            whole = await ask(server, "POST", "/v1/say", prompt="fails")
            assert whole.status_code == 503 and whole.json()["error"]["message"] == "no memory left"

    asyncio.run(test())


@pytest.mark.parametrize("stream", [True, False])
def test_an_error_before_the_answer_keeps_its_status(stream: bool) -> None:
    async def full(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        yield Begun("fake", 1)
        raise RequestError("32 requests wait", "rate_limit_exceeded", status=429, retry_after=2.5)

    async def test() -> None:
        async with running(full) as server:
            answer = await ask(server, "POST", "/v1/say", prompt="x", stream=stream)
            assert answer.status_code == 429 and answer.headers["retry-after"] == "3"
            assert answer.json() == {"error": {"message": "32 requests wait", "code": "rate_limit_exceeded"}}

    asyncio.run(test())


def test_content_types_are_not_looked_at_but_compression_is() -> None:
    async def test() -> None:
        async with running() as server:
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                for kind in ("text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"):
                    answer = await client.post("/v1/say", content=b'{"prompt": "a"}', headers={"content-type": kind})
                    assert answer.json() == {"text": "a "}
                packed = await client.post("/v1/say", content=b"x", headers={"content-encoding": "gzip"})
                assert packed.status_code == 415
            waits = b"POST /v1/say HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\nexpect: 100-continue\r\n\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(waits)
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.close()

    asyncio.run(test())


def test_the_server_counts_what_it_does() -> None:
    async def test() -> None:
        async with running() as server:
            await ask(server, "POST", "/v1/say", prompt="a b c")
            await ask(server, "POST", "/v1/say", prompt=1)
            for n in range(3):
                await ask(server, "GET", f"/nope{n}")
            page = await ask(server, "GET", "/metrics")
            lines = dict(line.rsplit(" ", 1) for line in page.text.splitlines() if not line.startswith("#"))
            assert page.headers["content-type"].startswith("text/plain")
            wanted = {
                'outcore_requests_total{route="/v1/say",status="200"}': 1,
                'outcore_requests_total{route="/v1/say",status="400"}': 1,
                'outcore_requests_total{route="none",status="404"}': 3,
                "outcore_first_token_seconds_count": 1,
                "outcore_prompt_tokens_total": 3,
                "outcore_running": 0,
                "outcore_waiting": 0,
                'outcore_sweeps_total{model="fake"}': 7,
                'outcore_bytes_read_total{model="fake"}': 700,
                'outcore_tokens_total{model="fake"}': 70,
                'outcore_drafted_total{model="fake"}': 9,
                'outcore_accepted_total{model="fake"}': 3,
                "outcore_connections_late_total": 0,
            }
            assert {name: float(lines[name]) for name in wanted} == wanted

    asyncio.run(test())


NAMES = {
    "localhost": True,
    "LOCALHOST:8080": True,
    "127.0.0.1:1": True,
    "127.8.8.8": True,
    "[::1]:8080": True,
    "my.localhost": True,
    "host.docker.internal:8080": False,
    "evil.internal": False,
    "evil.example": False,
    "localhost.evil.example": False,
    "127.0.0.1.evil.example": False,
    "192.168.0.7:8080": False,
    "": False,
    "[::1": True,
    "[evil.example]": False,
}


def test_the_server_is_not_called_by_names_that_are_not_its_own() -> None:
    async def test() -> None:
        async with running() as server:
            for name, right in NAMES.items():
                answer = await exchange(
                    server.port, f"GET / HTTP/1.1\r\nhost: {name}\r\nconnection: close\r\n\r\n".encode()
                )
                assert answer.split()[1] == (b"200" if right else b"403"), name
            refused = await ask(server, "GET", "/api/tags", {"host": "evil.example"})
            assert refused.json() == {
                "error": "the host name 'evil.example' is not allowed; add it with --allowed-hosts"
            }
        async with running(access=Access(hosts={"box.lan"}, addresses=True)) as server:
            for name, right in {
                "box.lan:80": True,
                "192.168.0.7": True,
                "[fe80::1%25eth0]": True,
                "a.lan": False,
            }.items():
                assert (await ask(server, "GET", "/", {"host": name})).status_code == (200 if right else 403), name
        async with running(access=Access(hosts={"*"})) as server:
            assert (await ask(server, "GET", "/", {"host": "evil.example"})).status_code == 200

    asyncio.run(test())
    assert {"0.0.0.0", socket.gethostname().lower()} <= local_names("0.0.0.0")


def test_pages_of_others_may_not_ask_unless_they_are_allowed_to() -> None:
    async def test() -> None:
        evil = {"origin": "http://evil.example", "content-type": "text/plain"}
        async with running() as server:
            assert (await ask(server, "POST", "/v1/say", evil, prompt="a")).status_code == 403
            assert (await ask(server, "POST", "/v1/say", {"origin": "null"}, prompt="a")).status_code == 403
            own = await ask(server, "POST", "/v1/say", {"origin": server.url}, prompt="a")
            assert own.status_code == 200 and "access-control-allow-origin" not in own.headers
            assert (await ask(server, "OPTIONS", "/v1/say", evil)).status_code == 403
        async with running(access=Access(origins=["https://page.example"], key="k")) as server:
            page = {"origin": "https://page.example", "authorization": "Bearer k"}
            answer = await ask(server, "POST", "/v1/say", page, prompt="a")
            assert answer.status_code == 200
            assert answer.headers["access-control-allow-origin"] == "https://page.example"
            assert "x-outcore-ignored" in answer.headers["access-control-expose-headers"].lower()
            preflight = {"access-control-request-method": "POST", "access-control-request-headers": "x-api-key"}
            asked = await ask(server, "OPTIONS", "/v1/say", {"origin": "https://page.example"} | preflight)
            assert asked.status_code == 200 and "x-api-key" in asked.headers["access-control-allow-headers"]
            assert (await ask(server, "POST", "/v1/say", evil, prompt="a")).status_code == 403
            elsewhere = await ask(server, "OPTIONS", "/v1/say", {"origin": "http://evil.example"} | preflight)
            assert elsewhere.status_code == 200 and "access-control-allow-origin" not in elsewhere.headers
            # What went wrong can be read by the page, too.
            keyless = await ask(server, "GET", "/v1/models", {"origin": "https://page.example"})
            assert keyless.status_code == 401 and "access-control-allow-origin" in keyless.headers

        async with running(access=Access(origins=["localhost"])) as server:
            here = ("http://localhost:3000", "http://[::1]:1", "http://127.0.0.1")
            for origin in (*here, "http://localhost.evil.com", "null", "http://[x"):
                read = origin in here
                asked = await ask(server, "OPTIONS", "/v1/say", {"origin": origin} | preflight)
                assert (asked.headers.get("access-control-allow-origin") == origin) is read
                assert (await ask(server, "POST", "/v1/say", {"origin": origin}, prompt="a")).is_success is read

    asyncio.run(test())


def test_with_a_key_requests_must_carry_it() -> None:
    async def test() -> None:
        async with running(access=Access(key="sécret")) as server:
            for headers in (
                {"authorization": "Bearer sécret"},
                {"authorization": "bearer  sécret"},
                {"x-api-key": "sécret"},
                {"authorization": "Basic eDp5", "x-api-key": "sécret"},
                {"authorization": "Bearer none", "x-api-key": "sécret"},
            ):
                sent = {k: v.encode() for k, v in headers.items()}
                async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                    assert (await client.get("/v1/models", headers=sent)).status_code == 200, headers  # type: ignore[arg-type]
            for wrong in ({}, {"x-api-key": ""}, {"authorization": "Bearer secret"}, {"authorization": "sécret"}):
                async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                    sent = {k: v.encode() for k, v in wrong.items()}
                    answer = await client.get("/v1/models", headers=sent)  # type: ignore[arg-type]
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert "cret" not in answer.text
                assert ("the API key given is not the server's" in answer.text) == ("Bearer secret" in wrong.values())
            assert (await ask(server, "GET", "/health")).status_code == 200
            assert (await ask(server, "GET", "/")).status_code == 200
            assert (await ask(server, "GET", "/metrics")).status_code == 401
            assert "sécret" not in repr(Access(key="sécret"))

    asyncio.run(test())


async def steps(ask: GenerationRequest) -> AsyncGenerator[Event, None]:
    """As many pieces as the prompt says, 20 a second."""
    yield Begun("fake", 1)
    for _ in range(int(str(ask.prompt))):
        yield TextPart(0, ".")
        await asyncio.sleep(0.05)
    yield Finished(1, 1)


def test_it_ends_when_what_is_under_way_has_ended_and_refuses_what_comes() -> None:
    async def test() -> None:
        async with running(steps, drain_s=20) as server:
            kept = await asyncio.open_connection("127.0.0.1", server.port)
            kept[1].write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            await kept[0].readuntil(b"}")
            answers = [
                asyncio.create_task(exchange(server.port, posted("/v1/say", {"prompt": "16", "stream": stream})))
                for stream in (True, False)
            ]
            while server.service.under_way < 2:
                await asyncio.sleep(0.01)
            server.server.should_exit = True
            while not server.site.closing:
                await asyncio.sleep(0.01)
            refused = await exchange(server.port, posted("/v1/say", {"prompt": "1"}))
            assert refused.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in refused
            health = await exchange(server.port, b"GET /health HTTP/1.0\r\n\r\n")
            assert health.startswith(b"HTTP/1.1 503 ") and b'"closing"' in health
            streamed, whole = await asyncio.gather(*answers)
            assert streamed.count(b'data: "."') == 16 and b"[DONE]" in streamed
            assert whole.endswith(b'{"text":"................"}')
            assert await asyncio.wait_for(kept[0].read(), 20) == b""
            kept[1].close()
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", server.port)
        assert not server.raised and server.service.closed == 0

    asyncio.run(test())


def test_an_answer_that_takes_too_long_to_end_says_so() -> None:
    async def test() -> None:
        began = time.monotonic()
        async with running(steps, drain_s=0.2) as server:
            answers = [
                asyncio.create_task(exchange(server.port, posted("/v1/say", {"prompt": "100000", "stream": stream})))
                for stream in (True, False)
            ]
            while server.service.under_way < 2:
                await asyncio.sleep(0.01)
            server.server.should_exit = True
            streamed, whole = await asyncio.gather(*answers)
            assert b'data: {"error":"the server is shutting down"}' in streamed
            assert streamed.endswith(b"\r\n0\r\n\r\n")  # the stream's proper end
            assert whole.startswith(b"HTTP/1.1 503 ") and b"shutting_down" in whole
        assert time.monotonic() - began < 60
        assert not server.raised and server.service.under_way == 0

    asyncio.run(test())


def test_a_second_signal_ends_it_at_once_and_running_answers_get_an_error() -> None:
    async def test() -> None:
        waited: list[int] = []
        async with running(steps, drain_s=3600) as server:
            server.server.draining = waited.append
            answer = asyncio.create_task(exchange(server.port, posted("/v1/say", {"prompt": "100000", "stream": True})))
            while server.service.under_way < 1:
                await asyncio.sleep(0.01)
            server.server.handle_exit(2, None)
            await asyncio.sleep(0.3)
            assert not answer.done()
            assert waited == [1]
            server.server.handle_exit(2, None)
            assert b"the server is shutting down" in await answer
        assert server.server.signals == [2, 2] and server.service.under_way == 0 and not server.raised

    asyncio.run(test())


def test_sockets_are_had_before_anything_is_loaded_or_refused() -> None:
    (one,) = listen("127.0.0.1", 0)
    port = one.getsockname()[1]
    try:
        one.listen()
        assert url("127.0.0.1", [one]) == f"http://127.0.0.1:{port}" and url("::1", [one]) == f"http://[::1]:{port}"
        with pytest.raises(OutcoreError, match=f"--host 127.0.0.1 --port {port}: Address already in use"):
            listen("127.0.0.1", port)
    finally:
        one.close()
    with pytest.raises(UsageError, match="--host no such host"):
        listen("no such host", 0)
    # Whatever of these this machine has.
    several = listen("localhost", 0)
    assert len({s.getsockname()[1] for s in several}) == 1
    for each in several:
        each.close()
