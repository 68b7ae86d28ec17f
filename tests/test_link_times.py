"""What the link between ranks does, measured."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from memory_link import MemoryLink, memory_links
from outcore_cluster.group import RankGroup
from outcore_cluster.link_protocol import Link
from outcore_cluster.timing import LARGE, LinkTimes, measure_link


def on_all(links: list[Link], work: Any = measure_link) -> list[LinkTimes]:
    found: dict[int, LinkTimes] = {}
    threads = [threading.Thread(target=lambda k=k: found.update({k.rank: work(k)})) for k in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [found[rank] for rank in range(len(links))]


def test_latency_and_rate_of_the_slowest_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second rank's link is slow, by a clock of the test's own; all ranks are told the same."""
    send, now = MemoryLink.send, [0.0]

    def slow(link: MemoryLink, to: int, data: memoryview) -> None:
        if 2 in (link.rank, to):
            now[0] += 0.01 + data.nbytes / 50e6
        send(link, to, data)

    monkeypatch.setattr(MemoryLink, "send", slow)
    times, *others = on_all(memory_links(3), lambda link: measure_link(link, lambda: now[0]))
    assert others == [times, times]
    assert times.latency_s == pytest.approx(0.01, rel=0.01)
    assert times.rate == pytest.approx(50e6, rel=0.01)


def test_a_link_is_measured_once() -> None:
    links = memory_links(2)
    sent: list[int] = []
    send = links[0].send

    def counted(to: int, data: memoryview) -> None:
        sent.append(data.nbytes)
        send(to, data)

    links[0].send = counted  # type: ignore[method-assign]
    groups = {link: RankGroup(link) for link in links}
    first = on_all(links, lambda link: groups[link].times)
    count = len(sent)
    assert LARGE[0] in sent
    again = on_all(links, lambda link: groups[link].times)
    assert again == first
    assert len(sent) == count
