"""Who does not belong to a run can neither join nor disturb it: wrong keys, wrong ranks, garbage, those who dawdle."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest

from link_ranks import QUICK, facts, handshake, identities, in_threads, linked
from outcore.errors import LinkError
from outcore_cluster.link.meeting import CONTROL, DATA, PROTOCOL, Facts, HandshakeError, Identity, RefusedError
from outcore_cluster.link.socket_link import SocketLink

Stranger = Callable[[tuple[str, int], Identity], object]


def connected(address: tuple[str, int]) -> socket.socket:
    sock = socket.create_connection(address, timeout=60)
    sock.settimeout(60)
    return sock


def sends(data: bytes) -> Stranger:
    def stranger(address: tuple[str, int], _: Identity) -> None:
        with connected(address) as sock, contextlib.suppress(OSError):
            sock.sendall(data)
            while sock.recv(4096):
                pass

    return stranger


def asks(**changes: object) -> Stranger:
    """A client that knows the key, or another, and says something else than it should."""

    def stranger(address: tuple[str, int], one: Identity) -> None:
        key = changes.pop("key", one.key)
        assert isinstance(key, bytes)
        with connected(address) as sock, pytest.raises(HandshakeError):
            handshake(sock, key, facts(one, CONTROL)._replace(**changes), 60)  # type: ignore[arg-type]

    return stranger


STRANGERS: dict[str, Stranger] = {
    "nothing": sends(b""),
    "http": sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 20),
    "zeros": sends(bytes(100_000)),
    "its magic": sends(b"OUTCLINK" + bytes(1000)),
    "another protocol": sends(b"OUTCLINK" + struct.pack("!H", PROTOCOL + 1) + bytes(32)),
    "a long name": sends(
        b"OUTCLINK" + struct.pack("!H", PROTOCOL) + bytes(32) + struct.pack("!?H", True, 65535) + bytes(99)
    ),
    "another key": asks(key=b"x" * 32),
    "another run": asks(run="other"),
    "another version": asks(version="0.9"),
    "another size": asks(size=3),
    "rank 0 itself": asks(rank=0),
    "a rank too many": asks(rank=2),
    "a negative rank": asks(rank=-1),
    "for another": asks(to=1),
    "no purpose": asks(purpose="x"),
}


@pytest.mark.parametrize("stranger", STRANGERS.values(), ids=STRANGERS)
def test_a_stranger_is_refused_and_the_run_begins_as_if_there_had_been_none(stranger: Stranger) -> None:
    (zero, one), (listener, other) = identities(2)
    other.close()

    def late() -> SocketLink:
        stranger(zero.addresses[0], one)
        return SocketLink(one, QUICK, leave=None)

    links = in_threads([lambda: SocketLink(zero, QUICK, listener, leave=None), late])
    assert all(isinstance(link, SocketLink) for link in links), links
    found = in_threads([partial(link.gather, b"%d" % link.rank) for link in links])
    assert found == [[b"0", b"1"]] * 2
    in_threads([link.close for link in links])


def test_random_bytes_at_every_stage_are_refused() -> None:
    rng = random.Random(3)
    (zero, one), (listener, other) = identities(2)
    other.close()

    def crowd() -> SocketLink:
        for _ in range(40):
            with connected(zero.addresses[0]) as sock, contextlib.suppress(OSError):
                whole = (
                    b"OUTCLINK" + struct.pack("!H", PROTOCOL) + rng.randbytes(32) + b"\x01\x00\x40" + rng.randbytes(200)
                )
                sock.sendall(whole[: rng.randrange(len(whole))] + rng.randbytes(rng.randrange(50)))
        return SocketLink(one, QUICK, leave=None)

    links = in_threads([lambda: SocketLink(zero, QUICK, listener, leave=None), crowd])
    assert all(isinstance(link, SocketLink) for link in links), links
    in_threads([link.close for link in links])


def test_silent_strangers_keep_no_rank_out() -> None:
    (zero, one), (listener, other) = identities(2)
    other.close()
    with contextlib.ExitStack() as held:

        def crowd() -> SocketLink:
            for _ in range(100):
                held.enter_context(connected(zero.addresses[0]))
            return SocketLink(one, QUICK, leave=None)

        links = in_threads([lambda: SocketLink(zero, QUICK, listener, leave=None), crowd])
        assert all(isinstance(link, SocketLink) for link in links), links
        in_threads([link.close for link in links])


def test_silent_strangers_that_come_again_keep_no_rank_out() -> None:
    (zero, one), (listener, other) = identities(2)
    other.close()
    over = threading.Event()

    def stranger() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), connected(zero.addresses[0]) as sock:
                sock.recv(1)
            over.wait(0.02)

    crowd = [threading.Thread(target=stranger, daemon=True) for _ in range(64)]
    for thread in crowd:
        thread.start()

    def late() -> SocketLink:
        time.sleep(0.3)
        return SocketLink(one, limits, leave=None)

    limits = replace(QUICK, handshake=5.0, start=3.0)
    try:
        links = in_threads([lambda: SocketLink(zero, limits, listener, leave=None), late])
        assert all(isinstance(link, SocketLink) for link in links), links
        in_threads([link.close for link in links])
    finally:
        over.set()
        for thread in crowd:
            thread.join(60)


def test_a_second_of_a_rank_is_refused_and_the_first_goes_on() -> None:
    (zero, one, two), (listener, first, second) = identities(3)
    second.close()

    def rank_2() -> SocketLink:
        time.sleep(0.5)
        with connected(zero.addresses[0]) as sock, pytest.raises(RefusedError, match="there is a rank 1 already"):
            handshake(sock, one.key, facts(one, DATA), 2)
        return SocketLink(two, QUICK, leave=None)

    links = in_threads(
        [
            lambda: SocketLink(zero, QUICK, listener, leave=None),
            lambda: SocketLink(one, QUICK, first, leave=None),
            rank_2,
        ]
    )
    assert all(isinstance(link, SocketLink) for link in links), links
    in_threads([link.close for link in links])


def test_an_answer_without_the_key_is_not_believed() -> None:
    for wrong in (b"x" * 32, b""):
        ours, theirs = socket.socketpair()
        me = Facts("1.0", "run", 2, 1, 0, CONTROL)
        found = in_threads([partial(handshake, ours, b"k" * 32, me, 2.0), partial(_answer_and_close, theirs, wrong)])
        assert all(isinstance(error, HandshakeError) for error in found), found
        ours.close()


def _answer_and_close(sock: socket.socket, key: bytes) -> Facts:
    with sock:
        return handshake(sock, key, lambda _: "", 2.0)


def test_what_one_side_has_said_cannot_be_sent_back_as_the_other() -> None:
    """A mirror has no key, and says what it hears."""
    ours, mirror = socket.socketpair()

    def reflect() -> None:
        with mirror, contextlib.suppress(OSError):
            while data := mirror.recv(4096):
                mirror.sendall(data)

    def run() -> None:
        with ours:
            handshake(ours, b"k" * 32, Facts("1.0", "run", 2, 1, 0, CONTROL), 1.0)

    found = in_threads([run, reflect])
    assert isinstance(found[0], HandshakeError) and str(found[0]) == "it has another key", found


def test_another_version_is_reported_to_both() -> None:
    (zero, one), (listener, other) = identities(2)
    other.close()
    limits = replace(QUICK, start=1.0)
    found = in_threads(
        [
            lambda: SocketLink(zero, limits, listener, leave=None),
            lambda: SocketLink(replace(one, version="0.9"), limits, leave=None),
        ]
    )
    assert all(isinstance(error, LinkError) for error in found), found
    for error in found:
        assert "Outcore 0.9 there, 1.0 here: install the same version on all hosts" in str(error)


def test_no_rank_listens_once_all_are_there() -> None:
    with linked(2) as links, pytest.raises(ConnectionRefusedError):
        connected(links[0]._me.addresses[0])


def test_bytes_that_are_no_frames_end_the_run_with_the_name_of_their_sender() -> None:
    with linked(2) as (zero, one):
        one._peers[0].control.sock.sendall(b"x" * 100)
        with pytest.raises(LinkError, match=r"rank 1 \(host1\): it sent bytes that are not a message"):
            zero.receive(1, memoryview(bytearray(3))).wait()
