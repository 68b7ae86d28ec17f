"""Pictures in the bodies of all APIs, before a model sees them; and what a service does with them. Needs Pillow."""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed: pip install 'outcore[vision]'")

from outcore.errors import BudgetError, UsageError  # noqa: E402
from outcore.serve import requests  # noqa: E402
from outcore.serve.api import Api  # noqa: E402
from outcore.serve.app import OPENAI  # noqa: E402
from outcore.serve.events import RequestError  # noqa: E402
from outcore_apis.apis import ANTHROPIC, OLLAMA, RESPONSES  # noqa: E402
from outcore_vision import parts  # noqa: E402
from outcore_vision.media import Images  # noqa: E402
from outcore_vision.parts import Sent, ready  # noqa: E402
from translated import asked  # noqa: E402

TAKEN = {"pixels": 1 << 22, "bytes": 1 << 20, "count": 3}
TEXT = {"type": "text", "text": "Look:"}


def png(width: int = 6, height: int = 4) -> str:
    file = BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


PNG = png()
URI = f"data:image/png;base64,{PNG}"


@pytest.fixture(autouse=True)
def readers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, reader in parts.READERS.items():
        monkeypatch.setitem(requests.OPAQUE, name, reader)


def chat(*content: Any) -> tuple[Api, str, dict[str, Any]]:
    return OPENAI, "/v1/chat/completions", {"messages": [{"role": "user", "content": list(content)}]}


def anthropic(*content: Any) -> tuple[Api, str, dict[str, Any]]:
    return ANTHROPIC, "/v1/messages", {"max_tokens": 1, "messages": [{"role": "user", "content": list(content)}]}


def responses(*content: Any) -> tuple[Api, str, dict[str, Any]]:
    return RESPONSES, "/v1/responses", {"input": [{"role": "user", "content": list(content)}]}


def ollama(*images: Any, generates: bool = False) -> tuple[Api, str, dict[str, Any]]:
    if generates:
        return OLLAMA, "/api/generate", {"prompt": "Look:", "images": list(images)}
    return OLLAMA, "/api/chat", {"messages": [{"role": "user", "content": "Look:", "images": list(images)}]}


def source(**given: Any) -> dict[str, Any]:
    return {"type": "image", "source": given}


FORMS = {
    "OpenAI, an object": (chat(TEXT, {"type": "image_url", "image_url": {"url": URI, "detail": "auto"}}),
                          "messages[0].content[1].image_url.url"),
    "OpenAI, a string": (chat(TEXT, {"type": "image_url", "image_url": URI}), "messages[0].content[1].image_url"),
    "Responses": (responses({"type": "input_text", "text": "Look:"}, {"type": "input_image", "image_url": URI}),
                  "input[0].content[1].image_url"),
    "Anthropic": (anthropic(TEXT, source(type="base64", media_type="image/png", data=PNG)),
                  "messages[0].content[1].source.data"),
    "Anthropic, an address": (anthropic(TEXT, source(type="url", url=URI)), "messages[0].content[1].source.url"),
    "Ollama": (ollama(PNG), "messages[0].images"),
    "Ollama, generate": (ollama(PNG, generates=True), "images"),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_each_api_gives_the_picture_to_the_template(form: str) -> None:
    (api, path, body), where = FORMS[form]
    messages = asked(api, path, body).requests[0].messages or ()
    text, part = messages[0]["content"][:: -1 if api is OLLAMA else 1]
    assert text == TEXT and part["type"] == "image" and part["image"].where == where
    asyncio.run(ready(messages, TAKEN, remote=False))
    assert (part["image"].mode, part["image"].size, part["image"].getpixel((0, 0))) == ("RGB", (6, 4), (255, 0, 0))


def test_images_of_a_tools_result_become_the_users() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1",
              "content": [TEXT, source(type="base64", data=PNG), {"type": "text", "text": "Done"}]}  # fmt: skip
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": "Look"}, {"role": "assistant", "content": [call]},
                                          {"role": "user", "content": [result, TEXT]}]}  # fmt: skip
    *_, tool, user = asked(ANTHROPIC, "/v1/messages", body).requests[0].messages or ()
    assert (tool["role"], tool["content"]) == ("tool", "Look:\nDone")
    assert user["content"][0]["image"].where == "messages[2].content[0].content[1].source.data"
    assert user["content"][1:] == [TEXT]
    called = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": "{}"}
    output = [{"type": "input_text", "text": "Seen"}, {"type": "input_image", "image_url": URI}]
    given = [{"role": "user", "content": "Look"}, called,
             {"type": "function_call_output", "call_id": "t1", "output": output}]  # fmt: skip
    *_, tool, user = asked(RESPONSES, "/v1/responses", {"input": given}).requests[0].messages or ()
    assert (tool["role"], tool["content"]) == ("tool", "Seen") and user["role"] == "user"
    assert user["content"][0]["image"].where == "input[2].output[1].image_url"


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_text_refuses_the_picture_by_its_path(form: str) -> None:
    (api, path, body), where = FORMS[form]
    messages = asked(api, path, body).requests[0].messages or ()
    with pytest.raises(RequestError, match="this model reads text only") as failed:
        asyncio.run(ready(messages, {}, remote=False))
    assert failed.value.param == where and failed.value.status == 400


def test_a_picture_in_another_message_than_the_users_is_refused_with_where_it_belongs() -> None:
    said, why = [{"type": "image_url", "image_url": URI}], "is not supported here; put it into a message of the user"
    for api, path, name in (
        (OPENAI, "/v1/chat/completions", "messages"),
        (RESPONSES, "/v1/responses", "input"),
        (ANTHROPIC, "/v1/messages", "messages"),
    ):
        for role in ("system", "assistant"):
            given = [{"role": "user", "content": "Look:"}, {"role": role, "content": said}]
            with pytest.raises(RequestError, match=f"image_url {why}"):
                asked(api, path, {"max_tokens": 1, name: given} if api is ANTHROPIC else {name: given})
    with pytest.raises(RequestError, match=r"input_audio is not supported here; the models read text,.* image_url"):
        asked(*chat({"type": "input_audio"}))


@pytest.mark.parametrize(
    ("given", "where", "why"),
    [
        (chat({"type": "image_url"}), "messages[0].content[0].image_url", "a string is needed"),
        (chat({"type": "image_url", "image_url": {}}), "messages[0].content[0].image_url.url", "a string is needed"),
        (chat({"type": "image_url", "image_url": {"url": 7}}), "messages[0].content[0].image_url.url", "a string"),
        *(
            (chat({"type": "image_url", "image_url": there}), "messages[0].content[0].image_url", "an address")
            for there in ("file:///etc/passwd", "/etc/passwd", "ftp://a.example/", "blob:x", "javascript:x")
        ),
        (responses({"type": "input_image", "file_id": "f1"}), "input[0].content[0].file_id", "keeps no files"),
        (anthropic(source(type="file", file_id="f1")), "messages[0].content[0].source.type", "base64 or url"),
        (anthropic(source(type="url", url="file:///etc/passwd")), "messages[0].content[0].source.url", "an address"),
        (anthropic(source(type="base64")), "messages[0].content[0].source.data", "base64 is needed"),
        (ollama(7), "messages[0].images", "base64 is needed"),
    ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_when_it_is_read(given: Any, where: str, why: str) -> None:
    with pytest.raises(RequestError, match=why) as failed:
        asked(*given)
    assert failed.value.param == where


@pytest.mark.parametrize(
    ("text", "why"),
    [("aGVsbG8=", "this file is not read"), ("@@", "not base64"), ("/etc/passwd", "is not read|not base64"),
     ("data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode(), "SVG is not read"),
     ("http://127.0.0.1/", "fetches no addresses"), (PNG[:60], "cut off"), ("data:image/png,x", "in base64")],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_with_its_path(text: str, why: str) -> None:
    messages = [{"role": "user", "content": [{"type": "image", "image": Sent("here", text)}]}]
    with pytest.raises(RequestError, match=why) as failed:
        asyncio.run(ready(messages, TAKEN, remote=False))
    assert (failed.value.param, failed.value.code, str(failed.value)[:6]) == ("here", "invalid_image", "here: ")


def test_addresses_are_fetched_where_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    got = list[str]()

    def fetched(url: str) -> bytes:
        got.append(url)
        return base64.b64decode(PNG)

    monkeypatch.setattr(parts, "fetched", fetched)
    content = [{"type": "image_url", "image_url": "HTTPS://a.example/x.png"}, TEXT]
    messages = asked(*chat(*content)).requests[0].messages or ()
    asyncio.run(ready(messages, TAKEN, remote=True))
    assert got == ["HTTPS://a.example/x.png"] and messages[0]["content"][0]["image"].size == (6, 4)
    monkeypatch.undo()
    with pytest.raises(RequestError, match="not a public address"):
        Sent("here", "http://127.0.0.1/").data(remote=True)


def test_little_detail_means_fewer_pixels() -> None:
    large = f"data:image/png;base64,{png(1000, 800)}"
    for detail, most in (("low", 512 * 512), ("high", 800_000)):
        content = {"type": "image_url", "image_url": {"url": large, "detail": detail}}
        messages = asked(*chat(content, TEXT)).requests[0].messages or ()
        asyncio.run(ready(messages, TAKEN, remote=False))
        width, height = messages[0]["content"][0]["image"].size
        assert most * 0.99 < width * height <= most


def sent(count: int, text: str = PNG) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "image", "image": Sent(f"at {n}", text)} for n in range(count)]}]


def test_pictures_and_pixels_of_a_request_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asyncio.run(ready(sent(3), TAKEN, remote=False))
    with pytest.raises(RequestError, match="more than 3 pictures") as failed:
        asyncio.run(ready(sent(4), TAKEN, remote=False))
    assert failed.value.param == "at 3"
    monkeypatch.setattr(parts, "MOST_PIXELS", 60)
    with pytest.raises(RequestError, match="in all pictures of a request") as failed:
        asyncio.run(ready(sent(3), TAKEN, remote=False))
    assert failed.value.param == "at 2"


def test_requests_wait_until_the_pictures_of_others_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(parts, "MOST_HELD", parts.held() + 24)
    asked, taken = [sent(1), sent(1)], TAKEN | {"pixels": 24}

    async def run() -> list[int]:
        # Both come while nothing is decoded.
        both = [asyncio.create_task(ready(each, taken, remote=False)) for each in asked]
        await asyncio.sleep(0.3)
        done = [n for n, task in enumerate(both) if task.done()]
        asked[done[0]].clear()
        await asyncio.wait_for(asyncio.gather(*both), 5)
        return done

    assert asyncio.run(run()) == [0]
    assert asked[1][0]["content"][0]["image"].size == (6, 4)


def test_a_slow_address_keeps_no_room_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    monkeypatch.setattr(parts, "MOST_HELD", parts.held() + 24)
    arrives = threading.Event()
    monkeypatch.setattr(parts, "fetched", lambda _: arrives.wait(20) and base64.b64decode(PNG))
    slow, others, taken = sent(1, "https://a.example/a.png"), sent(1), TAKEN | {"pixels": 24}

    async def run() -> None:
        late = asyncio.create_task(ready(slow, taken, remote=True))
        try:
            await asyncio.sleep(0.1)
            await asyncio.wait_for(ready(others, taken, remote=False), 5)
            assert not late.done()
            others.clear()
        finally:
            arrives.set()
        await asyncio.wait_for(late, 5)

    asyncio.run(run())
    assert slow[0]["content"][0]["image"].size == (6, 4)
    monkeypatch.setattr(parts, "SENT_BYTES", 10)
    with pytest.raises(RequestError, match="by addresses in a request"):
        asyncio.run(ready(sent(1, "https://a.example/a.png"), TAKEN, remote=True))


def test_what_failed_requests_would_have_decoded_counts_no_longer() -> None:
    gc.collect()
    before = parts.held()
    with pytest.raises(RequestError):
        asyncio.run(ready(sent(1, "AAAA"), TAKEN, remote=False))
    assert parts.held() == before


def test_what_a_picture_takes_is_the_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "folder_of", lambda config: config.get("model_type"))
    config = {"model_type": "x", "vision_config": {}}
    assert parts.takes(tmp_path, config) == {}
    config["vision_config"] = {"depth": 1}
    for settings, pixels in (
        ("{}", 1 << 22), ('{"max_pixels": 12845056}', 12845056), ('{"size": {"longest_edge": 16777216}}', 1 << 24),
        ('{"size": {"height": 384, "width": 384}}', 1 << 22), ('{"max_pixels": 99999999999}', 1 << 24), ("[", 1 << 22),
        ('{"size": 7, "max_pixels": "x"}', 1 << 22), ("[1]", 1 << 22),
    ):  # fmt: skip
        (tmp_path / "preprocessor_config.json").write_text(settings)
        assert parts.takes(tmp_path, config)["pixels"] == pixels, settings
    assert parts.takes(tmp_path, {"model_type": None, "vision_config": {"depth": 1}}) == {}


def test_what_image_flags_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(base64.b64decode(PNG))
    for source in (str(tmp_path / "a.png"), URI):
        assert parts._opened(source, TAKEN, False).size == (6, 4)
    monkeypatch.setattr("sys.stdin", type("Stdin", (), {"buffer": BytesIO(base64.b64decode(PNG))}))
    assert parts._opened("-", TAKEN, False).size == (6, 4)
    for source, why in (("https://a.example/a.png", "--allow-remote-images"), (f"{tmp_path}/b.png", "No such file"),
                        ("file:///etc/passwd", "the file's path")):  # fmt: skip
        with pytest.raises(UsageError, match=why):
            parts._opened(source, TAKEN, False)


def test_images_without_room_give_none_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text's images hold 7 bytes meanwhile."""

    @dataclass(frozen=True)
    class Size:
        kept: int

    def accommodate(*_: object) -> None:
        raise BudgetError("no room")

    released: list[Size] = []
    session = SimpleNamespace(
        size=Size(7), closed=False, plan=SimpleNamespace(prefill_step=1),
        residency=SimpleNamespace(accommodate=accommodate, release=released.append),
    )  # fmt: skip
    monkeypatch.setattr(Images, "room", lambda *_: 5)
    images, told = Images(0, [1], []), list[int]()
    with pytest.raises(BudgetError):
        images.open(cast(Any, SimpleNamespace(outcore=session)), 0, [1], told.append)
    images.close()
    assert not released and not told
