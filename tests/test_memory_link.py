"""Ranks as threads of one process: what a link promises."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from outcore.errors import LinkError
from outcore_cluster.link.link import Link
from outcore_cluster.link.memory_link import memory_links


def on_all(links: list[Link], work: Callable[[Link], Any]) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda k=k: found.update({k.rank: work(k)})) for k in links]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(len(links))]


def test_messages_come_in_order_and_in_place() -> None:
    one, two = memory_links(2)
    buffers = [bytearray(3), bytearray(5)]
    arrivals = [two.receive(0, memoryview(b)) for b in buffers]
    assert not arrivals[0].ready
    data = bytearray(b"abc")
    one.send(1, memoryview(data))
    one.flush()
    data[:] = b"xyz"
    one.send(1, memoryview(b"defgh"))
    assert arrivals[0].ready
    arrivals[1].wait()
    arrivals[0].wait()
    assert [bytes(b) for b in buffers] == [b"abc", b"defgh"]


def test_another_length_is_refused() -> None:
    one, two = memory_links(2)
    arrival = two.receive(0, memoryview(bytearray(4)))
    one.send(1, memoryview(b"abc"))
    with pytest.raises(LinkError, match="rank 0 sent 3 bytes where 4 were expected"):
        arrival.wait()


def test_who_is_silent_or_gone_is_named() -> None:
    one, two = memory_links(2, patience_s=0.05)
    with pytest.raises(LinkError, match=r"rank 0 .*silent for 0.05 s"):
        two.receive(0, memoryview(bytearray(4))).wait()
    one.close()
    for _ in range(2):
        with pytest.raises(LinkError, match=r"rank 0 .*gone"):
            two.receive(0, memoryview(bytearray(4))).wait()
    with pytest.raises(LinkError, match="gone"):
        two.agree(b"")


def test_all_agree_on_rank_0s_value_and_know_everybodys() -> None:
    def work(link: Link) -> Any:
        mine = bytes([link.rank])
        return [link.agree(mine), link.gather(mine), link.agree(mine + b"!")]

    assert on_all(memory_links(3), work) == [[b"\0", [b"\0", b"\1", b"\2"], b"\0!"]] * 3
