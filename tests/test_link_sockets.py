"""The link over sockets: bytes in order, one value for all, and an end of all ranks when one fails."""

from __future__ import annotations

import random
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from link_ranks import QUICK, identities, in_threads, linked
from outcore.errors import LinkError
from outcore_cluster.link.socket_link import SocketLink
from outcore_cluster.link_protocol import Link


def test_bytes_come_in_order_and_whole() -> None:
    rng = random.Random(1)
    lengths = [0, 1, 23, 24, 25, 65537, 3_000_001, 0, 7, *(rng.randrange(200_000) for _ in range(40))]
    messages = [rng.randbytes(length) for length in lengths]
    with linked(2) as (zero, one):
        for message in messages:
            zero.send(1, memoryview(message))
            one.send(0, memoryview(message[::-1]))
        there = [bytearray(length) for length in lengths]
        back = [bytearray(length) for length in lengths]
        arrivals = [one.receive(0, memoryview(into)) for into in there]
        arrivals += [zero.receive(1, memoryview(into)) for into in back]
        for arrival in reversed(arrivals):
            arrival.wait()
            assert arrival.ready
        zero.flush()
        one.flush()
    assert [bytes(got) for got in there] == messages
    assert [bytes(got)[::-1] for got in back] == messages


def test_small_messages_are_sent_before_they_are_received() -> None:
    """They leave at once until the kernel takes no more of them, which may be in the middle of one; then they wait."""
    messages = [number.to_bytes(4, "big") * 4000 for number in range(1500)]
    with linked(2) as (zero, one):
        for message in messages:
            zero.send(1, memoryview(message))
        assert zero._data[1].leaving
        for message in messages:
            into = bytearray(16_000)
            one.receive(0, memoryview(into)).wait()
            assert into == message
        zero.flush()


def test_what_is_small_leaves_without_a_thread() -> None:
    """Which would wait for an interpreter that goes on computing."""
    before = sys.getswitchinterval()
    with linked(2) as (zero, one):
        into = bytearray(8)
        one.receive(0, memoryview(into))
        sys.setswitchinterval(5)
        try:
            zero.send(1, memoryview(b"12345678"))
            assert not zero._data[1].leaving
        finally:
            sys.setswitchinterval(before)


def test_what_was_sent_and_received_is_let_go() -> None:
    """Arrays of MLX are kept alive by what is shown of them."""
    with linked(2) as (zero, one):
        sent, into = np.ones(1000, np.uint8), np.zeros(1000, np.uint8)
        gone = [weakref.ref(sent), weakref.ref(into)]
        zero.send(1, sent.data)
        arrival = one.receive(0, into.data)
        arrival.wait()
        zero.flush()
        del sent, into, arrival
        end = time.monotonic() + 30
        while any(ref() is not None for ref in gone):
            assert time.monotonic() < end
            time.sleep(0.01)


def test_receives_posted_first_are_filled_in_place() -> None:
    with linked(3) as links:
        into = bytearray(10_000)
        arrival = links[2].receive(1, memoryview(into))
        time.sleep(0.05)
        assert not arrival.ready
        links[1].send(2, memoryview(b"x" * 10_000))
        arrival.wait()
        assert into == b"x" * 10_000


def test_messages_of_several_ranks_do_not_mix() -> None:
    with linked(4) as links:
        boxes = {source: [bytearray(4) for _ in range(50)] for source in (1, 2, 3)}
        arrivals = [links[0].receive(source, memoryview(box)) for source in boxes for box in boxes[source]]
        for number in range(50):
            for source in boxes:
                links[source].send(0, memoryview(bytes([source, number, source, number])))
        for arrival in arrivals:
            arrival.wait()
        for source, got in boxes.items():
            assert [bytes(box) for box in got] == [bytes([source, n, source, n]) for n in range(50)]


def test_all_agree_on_what_rank_0_says() -> None:
    def run(link: Link) -> list[bytes]:
        return [link.agree(b"%d %d" % (link.rank, n)) for n in range(200)]

    with linked(3) as links:
        found = in_threads([lambda link=link: run(link) for link in links])  # type: ignore[misc]
    assert found == [[b"0 %d" % n for n in range(200)]] * 3


def test_everybody_gets_everybodys_value() -> None:
    with linked(3) as links:
        for size in (0, 1, 100_000):
            values = [bytes([rank]) * size for rank in range(3)]
            found = in_threads([partial(link.gather, values[link.rank]) for link in links])
            assert found == [values] * 3


def test_a_large_message_that_is_not_received_delays_no_sign_of_life() -> None:
    with linked(2, silence=1.0) as (zero, one):
        message, into = bytes(30_000_000), bytearray(30_000_000)
        zero.send(1, memoryview(message))
        time.sleep(2.0)  # longer than the silence that is allowed
        one.receive(0, memoryview(into)).wait()
        zero.flush()


def ends(work: Callable[[], Any]) -> str:
    """What it says of another rank; by itself, before anybody's silence would be noticed."""
    (error,) = in_threads([work])
    assert isinstance(error, LinkError), error
    return str(error)


def test_a_length_that_differs_ends_the_run_on_all_ranks() -> None:
    with linked(3) as links:
        links[1].send(2, memoryview(bytes(10)))
        said = ends(links[2].receive(1, memoryview(bytearray(11))).wait)
        assert said == "rank 1 (host1): it sent 10 bytes instead of 11"
        assert ends(lambda: links[0].receive(1, memoryview(bytearray(1))).wait()) == said
        assert ends(lambda: links[1].agree(b"")) == said


def test_a_rank_that_ends_while_others_wait_for_it_is_named() -> None:
    with linked(3) as links:
        arrival = links[0].receive(2, memoryview(bytearray(3)))
        threading.Thread(target=links[2].close).start()
        said = ends(arrival.wait)
        assert said == "rank 2 (host2): its process has ended, or its connection broke"
        assert ends(lambda: links[1].agree(b"")) == said


def test_rank_0_that_ends_while_others_wait_for_its_value_is_named() -> None:
    with linked(3) as links:
        links[0].agree(b"the last one")
        assert links[2].agree(b"") == b"the last one"
        threading.Thread(target=links[0].close).start()
        said = ends(lambda: links[2].agree(b""))
        assert said == "rank 0 (host0): its process has ended, or its connection broke"


def test_a_rank_that_only_some_can_reach_is_the_one_that_is_named() -> None:
    """Rank 2 meets rank 0 and not rank 1, and ends because of that."""
    (zero, one, two), (listener, *others) = identities(3)
    for other in others:
        other.close()
    lost = replace(two, addresses=[two.addresses[0], ("127.0.0.1", 9), two.addresses[2]])
    slow, quick = replace(QUICK, start=3.0), replace(QUICK, start=1.0)
    found = in_threads(
        [
            lambda: SocketLink(zero, slow, listener, leave=None),
            lambda: SocketLink(one, slow, leave=None),
            lambda: SocketLink(lost, quick, leave=None),
        ]
    )
    assert [str(error).partition(" did not come")[0] for error in found[1:]] == ["rank 2 (host2)", "rank 1 (host1)"]
    assert str(found[0]).startswith("rank 1 (host1): did not come within 1 s of the start"), found


def test_a_rank_that_is_done_disturbs_no_other() -> None:
    with linked(3, silence=1.0, stall=1.0) as links:
        links[2].send(0, memoryview(b"last"))
        links[2].close()
        into = bytearray(4)
        links[0].receive(2, memoryview(into)).wait()
        assert into == b"last"
        time.sleep(2.0)
        links[1].send(0, memoryview(b"more"))
        links[0].receive(1, memoryview(into)).wait()
        assert into == b"more"


def test_a_rank_that_fails_ends_all() -> None:
    with linked(3) as links:
        arrival = links[0].receive(1, memoryview(bytearray(3)))
        links[2].fail("no disk")
        assert ends(arrival.wait) == "rank 2 (host2): no disk"
        assert ends(lambda: links[1].agree(b"")) == "rank 2 (host2): no disk"


def test_ranks_that_wait_for_one_another_are_found_out() -> None:
    with linked(2, stall=0.6) as links:
        arrivals = [links[rank].receive(1 - rank, memoryview(bytearray(3))) for rank in range(2)]
        found = in_threads([arrival.wait for arrival in arrivals])
        assert all("while all ranks wait for one another" in str(error) for error in found), found


def test_a_rank_that_asks_while_the_others_wait_for_its_data_is_found() -> None:
    with linked(3, stall=0.6) as links:
        found = in_threads([lambda: links[0].gather(b""), lambda: links[1].gather(b""), lambda: links[2].agree(b"")])
        assert all("while all ranks wait for one another" in str(error) for error in found), found


def test_a_rank_that_left_some_of_what_was_agreed_on_is_out_of_step() -> None:
    """It would take that for what comes next."""
    with linked(3) as links:
        links[0].agree(b"a token that rank 2 did not want")
        links[1].agree(b"")
        found = in_threads([lambda link=link: link.gather(b"") for link in links])  # type: ignore[misc]
        assert all(str(e).startswith("rank 2 (host2): is out of step: it has taken 0 values of 1") for e in found), (
            found
        )


def test_a_rank_that_does_nothing_while_another_waits_for_it_is_found_out() -> None:
    # In one process the others' work counts as the idle rank's, so heartbeats are rare: they cost time, too.
    with linked(3, stall=1.0, beat=0.4) as links:
        said = ends(links[0].receive(2, memoryview(bytearray(3))).wait)
        assert re.match(r"rank 2 \(host2\): has done nothing for \d+ s, while rank 0 waits for it", said), said


def test_a_rank_that_says_it_goes_on_is_waited_for() -> None:
    with linked(2, stall=0.6) as links:
        into = bytearray(3)
        arrival = links[0].receive(1, memoryview(into))

        def work() -> None:
            with links[1].working():
                time.sleep(2.0)
            links[1].send(0, memoryview(b"abc"))

        threading.Thread(target=work).start()
        arrival.wait()
        assert into == b"abc"


def test_a_value_that_a_user_has_to_think_about_may_take_long() -> None:
    with linked(2, stall=0.3) as links:
        found: list[bytes] = []
        thread = threading.Thread(target=lambda: found.append(links[1].agree(b"")))
        thread.start()
        time.sleep(2.0)
        links[0].agree(b"a question")
        thread.join(60)
        assert found == [b"a question"]


def test_closing_leaves_no_threads() -> None:
    before = threading.active_count()
    with linked(4):
        assert threading.active_count() > before
    end = time.monotonic() + 60
    while threading.active_count() > before:
        assert time.monotonic() < end
        time.sleep(0.01)
