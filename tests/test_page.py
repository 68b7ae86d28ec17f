"""The server's page, and the events that it shows."""

from __future__ import annotations

import asyncio
import json
import re
from html.parser import HTMLParser

import httpx
import pytest

from fake_service import running
from outcore.monitoring.publisher import Board
from outcore.serve.access import Access
from outcore_pages import pages as page
from watching import made_up

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


class Elements(HTMLParser):
    """What a page refers to, and the names of its elements."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.inline: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href", "action", "srcset", "data", "poster") and value != "data:,":
                self.outside.append(f"{tag} {name}={value}")
            if name == "id":
                self.ids.append(value or "")
            if name == "style" or name.startswith("on"):
                self.inline.append(f"{tag} {name}")


def test_a_browser_gets_the_page_and_programs_a_line() -> None:
    async def test() -> None:
        async with running(access=Access("secret")) as server, httpx.AsyncClient(trust_env=False) as client:
            plain = await client.get(server.url)
            assert plain.text == "Outcore is running" and plain.headers["vary"] == "Accept"
            found = await client.get(server.url, headers=BROWSER)
            assert found.status_code == 200 and found.headers["content-type"] == "text/html; charset=utf-8"
            assert found.text.startswith("<!doctype html>") and "secret" not in found.text
            policy = found.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy, "text could become elements in another way"
            assert found.headers["x-dns-prefetch-control"] == "off", "names in an answer would be looked up"
            for inside in Elements(found.text).outside:
                part = await client.get(f"{server.url}/{inside.partition('=')[2]}")
                kind = "text/css; charset=utf-8" if inside.startswith("link") else "text/javascript; charset=utf-8"
                kind = "application/manifest+json" if inside.endswith("manifest") else kind
                assert part.headers["content-type"] == kind, inside
                assert part.headers["x-content-type-options"] == "nosniff"
                assert ("immutable" in part.headers["cache-control"]) == ("vendor" in inside)
                known = {"If-None-Match": part.headers["etag"]}
                again = await client.get(part.url, headers=known)
                assert (again.status_code, again.content) == (304, b"")
            for kept in ("sw.js", "_app/version.json"):
                assert (await client.get(f"{server.url}/{kept}")).status_code == 200
            for other in ("page/none.js", "page/../pages.py", "page/%2e%2e/pages.py", "page/vendor", "page/"):
                assert (await client.get(f"{server.url}/{other}")).status_code in (401, 404), other
            elsewhere = {"Host": "evil.example"}
            assert (await client.get(server.url + "/page/main.js", headers=elsewhere)).status_code == 403
            refused = await client.get(server.url + page.EVENTS)
            assert refused.status_code == 401

    asyncio.run(test())


def test_the_page_needs_nothing_from_outside_and_takes_text_for_text() -> None:
    text = bytes(page.page().body).decode()
    elements = Elements(text)
    assert elements.inline == [] and "<style" not in text and "<script>" not in text, "its policy would not allow it"
    own = {name: data.decode() for name, (data, _) in page.contents().items() if "vendor" not in name}
    named = [re.sub(r"^\w+ \w+=(page/)?", "", one) for one in elements.outside]
    assert set(named) <= set(page.contents()) and len(named) == 6
    scripts = "".join(text for name, text in own.items() if name.endswith(".js"))
    parts = {"main.js", "page.css", "page.html", "sw.js", "version.json", "manifest.webmanifest"}
    assert set(re.findall(r'from "\./(.+?)"', scripts)) | parts == set(own)
    assert not re.search(r"https?://|@import|url\(", "".join(own.values()))
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "Function("):
        assert way not in scripts, "a model's text could be run"
    used = set(re.findall(r'(?:\$|put|wide|items|children|getElementById)\("([\w-]+)"', scripts))
    assert len(used) > 40 and used <= set(elements.ids), used - set(elements.ids)
    assert len(elements.ids) == len(set(elements.ids))
    labelled = set(re.findall(r'aria-(?:controls|labelledby)="([\w-]+)"', text))
    assert labelled <= set(elements.ids)


def test_events_come_while_somebody_looks_and_end_with_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def snapshot(self: Board) -> dict[str, object]:
        taken.append(1)
        return made_up()

    monkeypatch.setattr(Board, "snapshot", snapshot)
    monkeypatch.setattr(page, "EVERY_S", 0.05)

    async def test() -> None:
        async with running(access=Access("secret")) as server, httpx.AsyncClient(trust_env=False) as client:
            await asyncio.sleep(0.1)
            assert taken == []
            url, headers = server.url + page.EVENTS, {"Authorization": "Bearer secret"}
            async with client.stream("GET", url, headers=headers) as first:
                assert first.headers["content-type"].startswith("text/event-stream")
                lines = first.aiter_lines()
                event = await anext(lines)
                assert json.loads(event.removeprefix("data: "))["models"][0]["layers"] == "mmcrlddm"
                async with client.stream("GET", url, headers=headers) as second:
                    assert (await anext(second.aiter_lines())).startswith("data: ")
                    begun = len(taken)
                    for _ in range(16):
                        await anext(lines)
                assert len(taken) - begun <= 12, "eight events for one, and as many for both"
            await asyncio.sleep(0.3)
            so_far = len(taken)
            await asyncio.sleep(0.2)
            assert len(taken) == so_far, "nobody looks any more"
            async with client.stream("GET", url, headers=headers) as last:
                lines = last.aiter_lines()
                await anext(lines)
                server.site.closing = True
                assert len([line async for line in lines]) < 10

    asyncio.run(test())
