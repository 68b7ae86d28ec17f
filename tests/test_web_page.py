"""The server's page in a browser: what people do with it all day, and what a hostile answer may try."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import signal
import struct
import threading
import time
import zlib
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

import browser
import outcore_vision.parts
from fake_service import FakeService
from outcore.monitoring.publisher import Board
from outcore.serve import requests
from outcore.serve.access import Access
from outcore.serve.app import all_apis, application
from outcore.serve.events import Begun, Ended, Event, Finished, GenerationRequest, ModelCard, TextPart
from outcore.serve.server import Server, listen
from outcore.serve.site import Site
from outcore_pages.pages import contents
from watching import made_up, until

pytestmark = pytest.mark.skipif(browser.browser() is None, reason="no Chromium or Chrome is installed")

PAYLOADS = (
    "<script>pwned()</script>",
    "<img src=x onerror=pwned()>",
    "<svg onload=pwned()>",
    "<svg><script>pwned()</script></svg>",
    "<iframe srcdoc='<script>parent.pwned()</script>'></iframe>",
    "<body onload=pwned()>",
    "<details open ontoggle=pwned()>x</details>",
    "<input autofocus onfocus=pwned()>",
    "<a href=javascript:pwned()>x</a>",
    "[x](javascript:pwned())",
    "[x](JaVaScRiPt:pwned())",
    "[x](data:text/html,<script>pwned()</script>)",
    "![x](x\" onerror=\"pwned())",
    "<javascript:pwned()>",
    "\"><script>pwned()</script>",
    "</textarea></title></style><script>pwned()</script>",
    "<math><mtext><table><mglyph><style><img src=x onerror=pwned()>",
    "<form id=keys action=javascript:pwned()><input name=children></form>",
    "<style>@import 'x'; * { display: none }</style>",
    "<base href=//evil.example/><meta http-equiv=refresh content='0;url=//evil.example'>",
)  # fmt: skip
FENCES = ('```js" onload="pwned()\n<script>pwned()</script>\n```', "```html\n<img src=x onerror=pwned()>\n```")
"""Payloads of which nothing but the text is to be seen, and those whose fence is not."""

HELPERS = Path(__file__).parent / "support" / "page_helpers.js"

CODE = (
    "Some **code**:\n\n```python\ndef area(r):\n    return 3 * r\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n- x\n- y\n"
)


class Scripted(FakeService):
    """Says ``text`` word by word, after ``thought``, and waits for the disk ``stalls_s``; keeps what it was asked."""

    def __init__(self) -> None:
        super().__init__(self.say)
        self.text, self.thought, self.pace_s = CODE, "", 0.0
        self.asked: list[GenerationRequest] = []
        self.names: tuple[str, ...] = ("fake", "other")
        self.stalls_s: float | None = None
        self.stall_s, self.how = 10.0, "direct"
        self.images: dict[str, int] = {}

    async def say(self, ask: GenerationRequest) -> AsyncGenerator[Event, None]:
        self.asked.append(ask)
        yield Begun("fake", 3)
        for word in self.thought.split():
            yield TextPart(0, reasoning=word + " ")
        pieces = re.findall(r"\s*\S+|\s+$", self.text)
        self.stall_s += self.stalls_s or 0.0
        for piece in pieces:
            yield TextPart(0, piece)
            await asyncio.sleep(self.pace_s)
        yield Ended(0, "stop", len(pieces))
        yield Finished(3, len(pieces), prompt_s=0.1, generation_s=2.0)

    def snapshot(self) -> dict[str, Any]:
        if self.stalls_s is None:
            return {"models": []}
        disk = {
            "how": self.how,
            "bytes": 9e9,
            "gbps": 3.2,
            "ceiling_gbps": 3.7,
            "stall_s": self.stall_s,
            "stalled": 0.25,
        }
        return made_up(disk=disk)

    def models(self) -> list[ModelCard]:
        return [ModelCard(name, loaded=True, images=self.images) for name in self.names]

    def card(self, name: str) -> ModelCard:
        return ModelCard(name, loaded=True)


class Page:
    """The page of a server that is scripted, in a tab."""

    def __init__(self, tab: browser.Tab, url: str, locked: str, service: Scripted) -> None:
        self.tab, self.url, self.locked, self.service = tab, url, locked, service
        self.run, self.until = tab.run, tab.until

    def open(self) -> None:
        self.tab.open(self.url)
        self.until("document.getElementById('model')?.value")

    def send(self, text: str, *, wait: bool = True) -> None:
        self.run("document.getElementById('text').focus()")
        self.tab.type(text)
        self.until(f"document.getElementById('text').value === {json.dumps(text)}")
        self.tab.press("Enter", "\r")
        if wait:
            self.done()

    def done(self) -> None:
        self.until("document.getElementById('send').textContent === 'Send' && !document.querySelector('.busy')")

    def click(self, words: str, within: str = "body") -> None:
        """The last button of these words."""
        self.run(f"t.press({json.dumps(words)}, {json.dumps(within)})")

    def give(self, field: str, *files: tuple[str, object]) -> None:
        """Files of these names and contents, as if they were picked."""
        self.run(f"t.give({json.dumps(field)}, {json.dumps(files)})")

    def set(self, **values: str) -> None:
        """The settings of the conversation."""
        self.run("t.click('#settings-open')")
        for field, value in values.items():
            self.run(f"t.set({json.dumps(field)}, {json.dumps(value)}, 'input')")
        self.click("Done")

    def texts(self, selector: str) -> list[str]:
        found: list[str] = self.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return found


async def _serve(service: Scripted, ports: list[int], over: threading.Event) -> None:
    servers, tasks = [], []
    for access in (None, Access("secret")):
        site = Site(cast(Any, service), all_apis())
        server, sockets = Server(application(site, access), site, 1.0, lambda: None), listen("127.0.0.1", 0)
        servers.append(server)
        tasks.append(asyncio.create_task(server.serve(sockets)))
        ports.append(sockets[0].getsockname()[1])
    while not over.is_set():
        await asyncio.sleep(0.05)
    for server in servers:
        server.should_exit = True
    await asyncio.gather(*tasks)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    service, ports, over = Scripted(), cast(list[int], []), threading.Event()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(service, ports, over)))
    patch = pytest.MonkeyPatch()
    patch.setattr(Board, "snapshot", lambda self: service.snapshot())
    thread.start()
    try:
        program = browser.browser()
        assert program is not None
        with browser.opened(program, tmp_path_factory.mktemp("profile")) as tab:
            tab.call("Page.addScriptToEvaluateOnNewDocument", source=HELPERS.read_text(encoding="utf-8"))
            while len(ports) < 2:
                time.sleep(0.01)
            yield Page(tab, f"http://127.0.0.1:{ports[0]}/", f"http://127.0.0.1:{ports[1]}/", service)
    finally:
        over.set()
        thread.join()
        patch.undo()


@pytest.fixture
def page(shared: Page) -> Iterator[Page]:
    """With an empty store and a wide window."""
    shared.tab.call("Storage.clearDataForOrigin", origin=shared.url.rstrip("/"), storageTypes="all")
    fresh = Scripted()
    for name in ("text", "thought", "pace_s", "names", "asked", "stalls_s", "how", "status", "images"):
        setattr(shared.service, name, getattr(fresh, name))
    shared.tab.window(1300, 800)
    shared.open()
    yield shared
    violations, shared.tab.violations = shared.tab.violations, []
    assert violations == [] and not shared.run("window.ran"), "something ran, or wanted to"


def test_a_server_runs_in_any_thread_of_a_process_that_ignores_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    site, failed = Site(cast(Any, Scripted()), all_apis()), list[BaseException]()

    def run() -> None:
        try:
            with Server(application(site, None), site, 1.0, lambda: None).capture_signals():
                pass
        except BaseException as e:
            failed.append(e)

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not failed


def test_an_answer_is_markdown_its_figures_are_reported_and_a_reload_keeps_it(page: Page) -> None:
    page.service.thought = "let me see"
    page.set(system="Be brief.", temperature="0.7")
    page.send("An area, please")
    (asked,) = page.service.asked
    assert asked.messages is not None and [m["role"] for m in asked.messages] == ["system", "user"]
    assert asked.messages[0]["content"] == "Be brief." and asked.sampling.temperature == 0.7 and asked.model == "fake"

    def shown() -> None:
        (text,) = page.texts(".said.assistant .text")
        assert "def area(r):\n    return 3 * r\n" in text and "```" not in text and "**" not in text
        assert page.texts(".text strong") == ["code"] and page.texts(".text li") == ["x", "y"]
        assert page.texts(".hljs-keyword") == ["def", "return"] and page.texts(".code span:first-child")[0] == "python"
        assert page.texts("td.right") == ["2"]
        (figures,) = page.texts(".said.assistant .stats")
        assert re.fullmatch(r"\d+ tokens · [\d.]+ tok/s · first after \d+\.\d s", figures), figures
        assert page.texts(".thought > div") == ["let me see "] and not page.run(
            "document.querySelector('details').open"
        )
        assert "monospace" in page.run("getComputedStyle(document.querySelector('pre code')).fontFamily")

    shown()
    assert page.texts("#heard")[0].startswith("Some code:"), "what a screen reader hears"
    page.open()
    page.run("t.click('#chats a')")
    shown()
    page.run("navigator.clipboard.writeText = text => { window.copied = text; }")
    page.click("Copy", ".code")
    assert page.until("window.copied") == "def area(r):\n    return 3 * r\n"
    page.send("And more")
    last = page.service.asked[-1].messages
    assert last is not None and [m["role"] for m in last] == ["system", "user", "assistant", "user"]
    assert last[2]["content"] == CODE and page.service.asked[-1].sampling.temperature == 0.7


def test_an_answer_stops_goes_on_and_survives_a_reload_in_its_middle(page: Page) -> None:
    page.service.text, page.service.pace_s = "word " * 500, 0.01
    page.send("Count", wait=False)
    page.until("document.querySelector('.said.assistant .text')?.textContent.length > 20")
    assert (
        page.texts("#send") == ["Stop"]
        and page.run("document.getElementById('talk').getAttribute('aria-busy')") == "true"
    )
    closed = page.service.closed
    page.tab.press("Escape")
    page.done()
    assert page.texts(".said.assistant .stats") == ["stopped"]
    until(lambda: page.service.closed > closed)  # the server does not go on
    before = page.texts(".said.assistant .text")[0]
    page.service.text, page.service.pace_s = " and the rest", 0.0
    page.click("Continue")
    page.until("document.querySelector('.said.assistant .text').textContent.includes('and the rest')")
    page.done()
    assert page.service.asked[-1].continued and page.texts(".said.assistant .text")[0].startswith(before.strip())

    page.service.text, page.service.pace_s = "word " * 2000, 0.01
    page.send("Count again", wait=False)
    page.until("[...document.querySelectorAll('.said.assistant .text')].at(-1)?.textContent.length > 700")
    page.open()
    page.run("t.click('#chats a')")
    assert len(page.texts(".said.assistant .text")[-1]) > 300 and len(page.texts(".said")) == 4
    assert "Continue" in page.texts(".said:last-child button")


def test_what_waits_for_the_disk_is_reported(page: Page) -> None:
    page.service.stalls_s, page.service.pace_s = 1.5, 0.03
    page.until("document.getElementById('state').textContent === 'working'")
    page.run("t.click('#all')")
    assert page.run("document.getElementById('strip').getAttribute('aria-label')").startswith(
        "3 in memory, 1 computing"
    )
    assert page.texts("#stalled") == [f"25 %, {page.service.stall_s:.1f} s in all"] and page.texts("#rate") == ["3.20"]
    page.send("Hello")
    assert page.texts(".said.assistant .stats")[0].endswith(" · 1.5 s of waiting for the disk")
    assert page.texts("#stalled") == [f"25 %, {page.service.stall_s:.1f} s in all"]
    page.open()
    assert page.run("document.getElementById('server').checkVisibility()"), "it is remembered"


def test_messages_are_edited_and_regenerated(page: Page) -> None:
    page.service.text = "first"
    page.send("One")
    page.send("Two")
    page.service.text = "second"
    page.click("Regenerate")
    page.done()
    assert page.texts(".said .text") == ["One", "first", "Two", "second"]
    page.run("document.getElementById('text').focus()")
    page.tab.press("ArrowUp")
    page.tab.type("!")
    page.tab.press("Enter", "\r")
    page.done()
    assert page.texts(".said .text") == ["One", "first", "Two!", "second"]
    page.run("document.querySelector('.said.user .tools').children[1].click()")
    page.run("document.querySelector('.editing textarea').value = 'Uno'")
    page.click("Send", ".editing")
    page.done()
    assert page.texts(".said .text") == ["Uno", "second"] and len(page.service.asked) == 5
    assert page.texts("#notice")[0].startswith("3 messages are replaced.")
    page.click("Undo")
    assert page.texts(".said .text") == ["One", "first", "Two!", "second"]
    page.open()
    page.run("t.click('#chats a')")
    assert page.texts(".said .text") == ["One", "first", "Two!", "second"]


def png(width: int, height: int, colour: tuple[int, int, int] = (255, 0, 0), alpha: int = 255) -> list[int]:
    """A picture of one colour."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head, row = struct.pack(">IIBBBBB", width, height, 8, 6, 0, 0, 0), b"\0" + bytes((*colour, alpha)) * width
    parts = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(row * height)) + chunk(b"IEND", b"")
    return list(b"\x89PNG\r\n\x1a\n" + parts)


def sent_images(ask: GenerationRequest) -> list[tuple[str, tuple[int, ...]]]:
    """The kind and size of each image of the last message."""
    assert ask.messages is not None
    content, found = ask.messages[-1]["content"], []
    for part in content if isinstance(content, list) else ():
        if part["type"] == "image":
            head, _, text = part["image"].source.partition(",")
            data = base64.b64decode(text)
            size = struct.unpack(">II", data[16:24]) if "png" in head else ()
            found.append((head.removeprefix("data:image/").removesuffix(";base64"), size))
    return found


def test_images_are_picked_pasted_and_dragged_made_smaller_and_sent(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, reader in outcore_vision.parts.READERS.items():
        monkeypatch.setitem(requests.OPAQUE, name, reader)
    page.service.images = {"pixels": 4_000_000, "bytes": 1_000_000, "count": 3}
    page.tab.window(390, 800)
    models = page.service.models
    monkeypatch.setattr(page.service, "models", lambda: time.sleep(0.5) or models())  # a file may come before they do
    page.tab.open(page.url)
    page.give("file", ("large.png", png(2400, 1600)), ("broken.png", [137, 80, 78, 71]))
    page.until("document.querySelectorAll('#files img').length === 1 && !document.getElementById('notice').hidden")
    assert page.texts("#notice")[0].startswith("broken.png cannot be read as an image")
    page.run(f"t.hand('paste', 'pasted.png', {json.dumps(png(40, 30, alpha=0))})")
    page.until("document.querySelectorAll('#files img').length === 2")
    page.run(f"t.hand('drop', 'dropped.png', {json.dumps(png(30, 20))})")
    page.until("document.querySelectorAll('#files img').length === 3")
    assert page.run("t.outside()") == []
    page.give("file", ("fourth.png", png(8, 8)))
    page.until("document.getElementById('notice').textContent.startsWith('At most 3 images are taken.')")
    page.run("t.click('#files [aria-label=\"Remove dropped.png\"]')")
    page.send("What is it?")
    ask = page.service.asked[-1]
    assert ask.messages is not None and ask.messages[-1]["content"][-1] == {"type": "text", "text": "What is it?"}
    (large, (width, height)), small = sent_images(ask)
    assert large == "png" and 1_980_000 < width * height <= 2_000_000 and abs(width / height - 1.5) < 0.01
    assert small == ("png", (40, 30))
    assert page.run("[...document.querySelectorAll('.said.user img')].map(e => e.alt)") == ["large.png", "pasted.png"]
    assert page.run("[...document.querySelectorAll('.said.user img')].every(e => e.complete && e.naturalWidth)")
    assert page.run("t.outside()") == [] and page.texts("#files li") == []
    page.open()
    page.run("t.click('#chats a')")
    page.send("And now?")
    assert page.service.asked[-1].messages is not None and len(page.service.asked[-1].messages) == 3
    assert page.service.asked[-1].messages[0]["content"][0]["type"] == "image"
    page.run("t.catchDownloads()")
    page.run("t.click('#export-markdown')")
    assert "(image: large.png)" in page.until("window.saved")


def test_a_model_of_text_is_given_no_images_and_imports_bring_none_that_are_harmful(page: Page) -> None:
    page.give("file", ("b.png", png(8, 8)))
    page.until("!document.getElementById('notice').hidden")
    assert page.texts("#notice")[0].startswith("b.png is not a text file, and this model takes no images.")
    harmful = ("javascript:pwned()", "http://evil.example/x.png", "data:image/svg+xml;base64,PHN2Zy8+",
               "data:image/png;base64,AAAA\" onerror=\"pwned()", "data:text/html;base64,AAAA")  # fmt: skip
    files = [{"name": f"{n}", "text": "x", "image": image} for n, image in enumerate(harmful)]
    chat = {"id": "1", "title": "Taken", "changed": 1, "messages": [{"role": "user", "content": "x", "files": files}]}
    page.give("chats-file", ("a.json", json.dumps({"format": "outcore-chats/1", "chats": [chat]})))
    page.until("document.querySelectorAll('.said.user details').length === 5")
    assert page.run("document.querySelectorAll('img').length") == 0 and page.run("t.harmful()") == []


def test_conversations_files_and_exports(page: Page) -> None:
    page.service.text = "**yes**"
    page.give("file", ("a.py", "a = `1`\n"), ("b.png", [0, 255]))
    page.until("document.querySelectorAll('#files li').length")
    assert "b.png is not a text file" in page.texts("#notice")[0]
    page.send("What is this?")
    last = page.service.asked[-1].messages
    assert last is not None and last[0]["content"] == "a.py:\n```py\na = `1`\n```\n\nWhat is this?"
    page.tab.press("O", modifiers=10)
    assert page.texts(".said") == []
    page.run("t.set('model', 'other', 'change')")
    page.send("Another one")
    assert page.service.asked[-1].model == "other"
    assert page.texts("#chats a") == ["Another one", "What is this?"]
    page.run("t.click('#chats [aria-label=\"Rename Another one\"]')")
    page.tab.type("Another <one>")
    page.tab.press("Enter", "\r")
    assert page.texts("#chats a") == ["Another <one>", "What is this?"]
    page.run("t.catchDownloads()")
    page.run("t.click('#export-markdown')")
    assert page.until("window.saved") == "# Another <one>\n\n## You\n\nAnother one\n\n## other\n\n**yes**\n"
    page.run("window.saved = ''; document.getElementById('export-all').click()")
    saved = page.until("window.saved")
    assert json.loads(saved)["format"] == "outcore-chats/1" and len(json.loads(saved)["chats"]) == 2
    page.run("document.querySelector('#chats [aria-label^=Delete]').click()")
    page.until("document.querySelectorAll('#chats a').length === 1")
    page.click("Undo")
    page.until("document.querySelectorAll('#chats a').length === 2")
    # As another tab does.
    page.run("t.change({...JSON.parse(window.saved).chats[0], title: 'Renamed elsewhere', changed: 1})")
    page.until("[...document.querySelectorAll('#chats a')].some(a => a.textContent === 'Renamed elsewhere')")
    page.tab.call("Storage.clearDataForOrigin", origin=page.url.rstrip("/"), storageTypes="all")
    page.open()
    assert page.texts("#chats a") == []
    page.give("chats-file", ("c.json", saved))
    page.until("document.querySelectorAll('.said').length === 2")  # all are kept, and the first is shown
    page.open()
    assert sorted(page.texts("#chats a")) == ["Another <one>", "What is this?"]
    page.run("t.set('find', 'ANOTHER', 'input')")
    assert page.texts("#chats a") == ["Another <one>"]


def test_a_conversation_that_another_tab_deletes_does_not_come_back_with_its_answer(page: Page) -> None:
    page.service.text, page.service.pace_s = "word " * 2000, 0.02
    page.send("Long, please", wait=False)
    page.until("document.querySelector('.busy') && document.querySelector('.assistant .text').textContent.length > 20")
    page.run("t.remove()")
    page.until("!document.querySelector('#chats a') && !document.querySelector('.said')")
    page.done()
    assert page.run("t.stored()") == 0


def test_an_imported_conversation_has_an_address(page: Page) -> None:
    said = [{"role": "user", "content": "Hello"}]
    page.give("chats-file", ("c.json", json.dumps({"chats": [{"id": 5, "title": "Five", "messages": said}]})))
    page.until("document.querySelectorAll('.said').length === 1")
    page.tab.press("O", modifiers=10)
    page.run("t.click('#chats a')")
    page.until("document.querySelectorAll('.said').length === 1")


def test_nothing_that_is_said_runs(page: Page) -> None:
    everything = "\n\n".join((*PAYLOADS, *FENCES))
    page.service.names, page.service.text = ("fake", *PAYLOADS), everything
    page.service.thought = everything
    page.open()
    page.send(everything)
    assert page.run("t.harmful()") == []
    answer = page.texts(".said.assistant .text")[0]
    assert [p for p in PAYLOADS if p.replace('"', "") not in answer.replace('"', "")] == [], "not shown as text"
    assert page.texts(".said.user .text") == [everything] and answer.count("<script>") >= 6
    assert page.texts("#model option") == ["fake", *PAYLOADS]

    said = [{"role": role, "content": p, "reasoning": p, "about": p, "wrong": p, "files": [{"name": p, "text": p}]}
            for p in (*PAYLOADS, *FENCES) for role in ("user", "assistant")]  # fmt: skip
    hostile = [{"id": p, "title": p, "system": p, "model": p, "temperature": p, "messages": said[:4]} for p in PAYLOADS]
    odd: list[Any] = [
        None,
        7,
        {"messages": 3},
        {"messages": [None, {"role": "<b>"}, {"role": "user", "files": [None]}]},
    ]
    page.give(
        "chats-file", ("c.json", json.dumps({"chats": [{"title": PAYLOADS[0], "messages": said}, *hostile, *odd]}))
    )
    page.until(f"document.querySelectorAll('.said').length === {len(said)}")
    assert len(page.texts("#chats li")) == len(PAYLOADS) + 3 and page.run("t.harmful()") == []
    page.run("document.querySelectorAll('details').forEach(e => { e.open = true; }); document.body.offsetHeight")
    page.set()
    page.run("[...document.querySelectorAll('#chats [aria-label^=Delete]')].at(-1).click()")
    page.until("!document.getElementById('notice').hidden")
    assert page.run("t.harmful()") == []


def test_code_without_a_fence_keeps_its_indentation(page: Page) -> None:
    page.service.text = "def f(x):\n    if x:\n        return 1\n\n- item\n  more\n\nText\nand more\n"
    page.send("Code")
    (shown,) = page.run("[...document.querySelectorAll('.said.assistant .text')].map(e => e.innerText)")
    assert shown.startswith("def f(x):\n    if x:\n        return 1\n") and "item\nmore" in shown, shown


def test_what_is_not_known_yet_is_loading_and_what_is_not_counted_is_left_out(page: Page) -> None:
    html = contents()["page.html"][0].decode()
    assert html.count("loading…") == 2 and "loading…" not in page.texts("#model, #talk")
    page.service.status = "loading"
    page.until("document.getElementById('state').textContent === 'loading the model'")
    page.service.status, page.service.how = "ok", "none"
    page.until("document.getElementById('state').textContent === 'no model in memory'")
    page.service.stalls_s = 0.0
    page.until("document.getElementById('state').textContent === 'working'")
    page.run("t.click('#all')")
    assert page.texts("#made, #made-of") == ["tokens", "210"]
    assert page.run("[...document.querySelectorAll('.streams, #disk')].every(e => !e.checkVisibility())")


def test_an_answer_grows_into_what_it_is_as_a_whole(page: Page) -> None:
    text = CODE + "abc\n#\nabc\n#x\r\n\r\n1. a\n\n   b\n2. c\n\n> q\nlazy\n\nTitle\n===\n\n<b>x</b>\n\n~~~\nopen"
    assert [page.run(f"t.grown({json.dumps(text)}, {step})") for step in (1, 7)] == [True, True]


def test_two_hundred_messages_stay_smooth(page: Page) -> None:
    said = [{"role": role, "content": f"{n} {CODE}"} for n in range(100) for role in ("user", "assistant")]
    page.give("chats-file", ("c.json", json.dumps({"chats": [{"title": "long", "messages": said}]})))
    page.until("document.querySelectorAll('.said').length === 200")
    page.run("t.countFrames()")
    page.service.text, page.service.pace_s = CODE * 8, 0.008
    # Of the page's own thread, so that a busy machine makes no difference: scripts, styles and layout.
    page.tab.call("Performance.enable", timeDomain="threadTicks")
    before = spent_s(page)
    page.send("More")
    frames = page.run("drawn")
    assert frames > 3 and len(page.texts(".said")) == 202
    assert (spent_s(page) - before) / frames < 0.016
    page.tab.call("Performance.disable")
    assert page.run("{const t = document.getElementById('talk'); t.scrollHeight - t.scrollTop - t.clientHeight < 150}")


def spent_s(page: Page) -> float:
    """Processor seconds of the page until now."""
    metrics = {m["name"]: m["value"] for m in page.tab.call("Performance.getMetrics")["metrics"]}
    return float(sum(metrics[f"{what}Duration"] for what in ("Script", "RecalcStyle", "Layout")))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_is_readable(page: Page, scheme: str) -> None:
    page.service.text = (
        CODE + "```\n" + "long " * 80 + "\n```\n" + "x" * 300 + "\n\n|" + " wide |" * 40 + "\n|" + "-|" * 40
    )
    page.tab.window(390, 844, scheme)
    page.send("y" * 300)
    wide = "document.documentElement.scrollWidth > 390 || document.getElementById('talk').scrollWidth > 390"
    assert not page.run(wide)
    assert page.run("t.outside()") == []
    page.run("t.click('#menu')")
    assert page.run("document.getElementById('side').getBoundingClientRect().width") > 200 and not page.run(wide)
    page.tab.press("Escape")
    page.run("t.click('#all')")
    assert page.run("document.getElementById('server').getBoundingClientRect().right") <= 390
    assert page.run("t.faint()") == []
    dark = page.run("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).every(v => v < 40)")
    assert dark == (scheme == "dark")


def test_a_full_store_is_reported(page: Page) -> None:
    origin = page.url.rstrip("/")
    page.tab.call("Storage.overrideQuotaForOrigin", origin=origin, quotaSize=1000)
    try:
        page.service.text = "x" * 20_000
        page.send("Fill it")
        page.until("document.getElementById('notice').textContent.includes('storage is full')")
        assert len(page.texts(".said.assistant .text")[0]) == 20_000, "and it goes on"
    finally:
        page.tab.call("Storage.overrideQuotaForOrigin", origin=origin)


def test_a_server_with_a_key_asks_for_it_and_errors_are_shown(page: Page) -> None:
    page.tab.open(page.locked)
    page.until("document.getElementById('keys').open")
    page.run("document.getElementById('key').focus()")
    page.tab.type("secret")
    page.tab.press("Enter", "\r")
    page.until("document.getElementById('model')?.value")
    page.set(tokens="99999999999")
    page.send("Too much")
    assert "max_tokens" in page.texts(".wrong")[0] and page.texts(".said.user .text") == ["Too much"]
    page.set(tokens="")
    page.click("Try again")
    page.until("document.querySelectorAll('.said.assistant strong').length")
    page.done()
    assert page.texts(".wrong") == []


def test_a_worker_that_llamas_page_left_at_this_address_goes(page: Page) -> None:
    page.tab.open(page.url + "health")  # has no policy about workers
    held = "(async () => [(await navigator.serviceWorker.getRegistrations()).length, (await caches.keys()).length])()"
    page.run("caches.open('old').then(() => navigator.serviceWorker.register('/sw.js')).then(() => 1)")
    page.until(f"{held}.then(now => now.join() === '0,0')", 60)


def test_every_control_has_a_name(page: Page) -> None:
    page.send("Hello")
    page.run("document.querySelectorAll('dialog').forEach(e => e.show())")
    page.tab.call("Accessibility.enable")
    nodes = page.tab.call("Accessibility.getFullAXTree")["nodes"]
    roles = {"button", "textbox", "searchbox", "combobox", "spinbutton", "link", "log", "navigation", "dialog"}
    found = [(n["role"]["value"], n.get("name", {}).get("value", "")) for n in nodes if not n.get("ignored")]
    named = {role: [name for r, name in found if r == role] for role in roles}
    assert all(named.values()), {role for role in roles if not named[role]}
    assert [role for role, names in named.items() if not all(names) and role != "dialog"] == []
    page.tab.call("Accessibility.disable")
