"""Pictures from addresses: what is fetched, and all that is not (server-side request forgery)."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outcore_vision import fetch
from outcore_vision.fetch import allowed, fetched
from outcore_vision.formats import PictureError

PUBLIC = ("93.184.215.14", "8.8.8.8", "2606:4700:4700::1111")
PRIVATE = (
    "127.0.0.1", "127.1.2.3", "0.0.0.0", "0.1.2.3", "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1",
    "169.254.169.254", "169.254.170.2", "100.64.0.1", "100.100.100.200", "192.0.0.192", "198.18.0.1", "192.0.2.1",
    "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255", "::1", "::", "fe80::1", "fe80::1%eth0", "fc00::1",
    "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1",
    "64:ff9b:1::7f00:1", "2002:7f00:1::", "2001::1", "::7f00:1", "fec0::1", "2001:db8::1", "100::1", "localhost", "",
)  # fmt: skip


@pytest.mark.parametrize("address", PUBLIC)
def test_addresses_of_the_internet_are_reached(address: str) -> None:
    assert allowed(address)


@pytest.mark.parametrize("address", PRIVATE)
def test_addresses_of_this_machine_and_its_networks_are_not(address: str) -> None:
    assert not allowed(address)


def never(host: str, port: int) -> list[str]:
    pytest.fail(f"{host} was resolved")


@pytest.mark.parametrize(
    "url",
    ["file:///etc/passwd", "ftp://a.example/x", "gopher://a.example/", "//a.example/x", "http://", "http:///x", "x.png",
     "http://user:secret@a.example/", "http://a.example@b.example/", "http://a.example:22/", "https://a.example:80/",
     "http://a.example:6379/", "http://a.example/\r\nX: y", "http://a.example/ x", "http://a.example\\@b.example/",
     "http://a.example:99999/", "http://a.example:x/", "http://[::1/", "http://a.example/" + "x" * 5000, "http://ä.example/",
     "HTTP ://a.example/", "http://a.example/\x7f", "unix:///var/run/docker.sock", "data:image/png;base64,AAAA"],
)  # fmt: skip
def test_other_addresses_are_refused_before_a_name_is_resolved(url: str) -> None:
    with pytest.raises(PictureError) as failed:
        fetched(url, never)
    assert "secret" not in str(failed.value) and "\n" not in str(failed.value)


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1/", "http://localhost/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/", "http://0177.0.0.1/",
     "http://127.1/", "http://0/", "http://169.254.169.254/latest/meta-data/", "http://[::ffff:127.0.0.1]/",
     "https://127.0.0.1/", "http://[fe80::1%25lo]/"],
)  # fmt: skip
def test_ways_to_write_this_machine_are_refused(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "create_connection", lambda *_, **__: pytest.fail("it connected"))
    with pytest.raises(PictureError):
        fetched(url)


def test_one_private_address_among_public_ones_is_enough_to_refuse() -> None:
    with pytest.raises(PictureError, match="not a public address") as failed:
        fetched("http://a.example/x?token=secret", lambda *_: ["8.8.8.8", "10.1.2.3"])
    assert "10.1.2.3" not in str(failed.value) and "secret" not in str(failed.value)


Answer = Callable[[bytes, socket.socket], None]


@contextmanager
def server(answer: Answer) -> Iterator[tuple[int, list[bytes]]]:
    """A server on this machine; yields its port and the requests that it got."""
    listening, got = socket.create_server(("127.0.0.1", 0)), list[bytes]()

    def serve() -> None:
        while True:
            try:
                client, _ = listening.accept()
            except OSError:
                return
            with client:
                client.settimeout(5)
                data = b""
                while b"\r\n\r\n" not in data and (part := client.recv(65536)):
                    data += part
                got.append(data)
                with suppress(OSError):
                    answer(data, client)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1], got
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join(5)


def says(head: str, body: bytes = b"") -> Answer:
    return lambda _, client: client.sendall(f"HTTP/1.1 {head}\r\nConnection: close\r\n\r\n".encode() + body)


def local(url: str, allows: Callable[[str], bool] = lambda _: True, names: list[str] | None = None) -> bytes:
    """Fetches from a server of this test, to which every name resolves."""

    def resolve(host: str, port: int) -> list[str]:
        if names is not None:
            names.append(host)
        return ["127.0.0.1"]

    return fetched(url, resolve, allows=allows, ports=False)


def test_the_connection_is_made_to_the_checked_address(monkeypatch: pytest.MonkeyPatch) -> None:
    # No other resolution can be made: the name exists nowhere.
    monkeypatch.setattr(socket, "getaddrinfo", _only_numbers(socket.getaddrinfo))
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    names: list[str] = []
    with server(says("200 OK\r\nContent-Length: 4", b"data")) as (port, got):
        assert local(f"http://pictures.invalid:{port}/a%20b?c=d#e", names=names) == b"data"
    assert names == ["pictures.invalid"]
    head = got[0].decode().lower()
    assert head.startswith("get /a%20b?c=d http/1.1\r\n") and f"host: pictures.invalid:{port}\r\n" in head
    assert "cookie" not in head and "authorization" not in head and "referer" not in head


def _only_numbers(real: Callable[..., object]) -> Callable[..., object]:
    def resolve(host: str, *args: object, **kwargs: object) -> object:
        assert host.replace(".", "").isdecimal(), f"{host} was resolved by name"
        return real(host, *args, **kwargs)

    return resolve


def test_each_redirect_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, why in (
        ("http://127.0.0.1/", "not a public address"), ("file:///etc/passwd", "an http or https"),
        ("//b.example/", "not a public address"), ("http://u:p@b.example/", "user or password"),
    ):  # fmt: skip
        first = iter([["127.0.0.1"], ["127.0.0.1"]])
        allows = iter([True, False])
        with server(says(f"302 Found\r\nLocation: {there}\r\nContent-Length: 0")) as (port, got):
            with pytest.raises(PictureError, match=why):
                fetched(
                    f"http://a.invalid:{port}/",
                    lambda *_, f=first: next(f),
                    allows=lambda _, a=allows: next(a),
                    ports=False,
                )
            assert len(got) == 1
    with server(says("301 Moved\r\nLocation: /again\r\nContent-Length: 0")) as (port, got):
        with pytest.raises(PictureError, match="more than 5 redirects"):
            local(f"http://a.invalid:{port}/")
        assert len(got) == 6


def test_a_name_that_resolves_otherwise_the_second_time_is_not_followed() -> None:
    answers = iter([["127.0.0.1"], ["192.168.0.1"]])  # as DNS rebinding does
    with server(says("200 OK\r\nContent-Length: 2", b"ok")) as (port, _):
        found = fetched(
            f"http://a.invalid:{port}/", lambda *_: next(answers), allows=lambda a: a == "127.0.0.1", ports=False
        )
    assert found == b"ok" and next(answers) == ["192.168.0.1"]


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_BYTES", 1000)
    chunked = b"3e9\r\n" + bytes(1001) + b"\r\n0\r\n\r\n"
    for head, body in (
        ("200 OK\r\nContent-Length: 1001", b""),
        ("200 OK", bytes(1001)),
        ("200 OK\r\nTransfer-Encoding: chunked", chunked),
    ):
        with server(says(head, body)) as (port, _), pytest.raises(PictureError, match="larger than 1000 bytes"):
            local(f"http://a.invalid:{port}/")
    with server(says("200 OK", bytes(1000))) as (port, _):
        assert len(local(f"http://a.invalid:{port}/")) == 1000
    with server(says("200 OK\r\nContent-Length: 5", b"abc")) as (port, _), pytest.raises(PictureError, match="cut off"):
        local(f"http://a.invalid:{port}/")
    monkeypatch.setattr(fetch, "MOST_SECONDS", 0.3)

    def drips(_: bytes, client: socket.socket) -> None:
        client.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(100):
            client.sendall(b"x")
            time.sleep(0.05)

    def drips_head(_: bytes, client: socket.socket) -> None:
        for byte in b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100:
            client.sendall(bytes([byte]))
            time.sleep(0.05)

    for answer in (drips, drips_head, lambda *_: time.sleep(1)):
        began = time.monotonic()
        with server(answer) as (port, _), pytest.raises(PictureError, match="no answer within"):
            local(f"http://a.invalid:{port}/")
        assert time.monotonic() - began < 3


def test_a_slow_handshake_is_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MOST_SECONDS", 0.3)
    listening = socket.create_server(("127.0.0.1", 0))

    def drips() -> None:
        with listening.accept()[0] as client, suppress(OSError):
            for byte in b"\x16\x03\x03\x40\x00" + b"\2" * 60:
                client.sendall(bytes([byte]))
                time.sleep(0.05)

    thread, began = threading.Thread(target=drips, daemon=True), time.monotonic()
    thread.start()
    with listening, pytest.raises(PictureError, match="no answer within"):
        local(f"https://a.invalid:{listening.getsockname()[1]}/")
    assert time.monotonic() - began < 2
    thread.join(5)


def test_certificates_are_checked(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509", reason="cryptography is not installed, as mlx-vlm needs it")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now = datetime.now(UTC)
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + timedelta(1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName("a.invalid")]), critical=True)
    form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    pem = made.sign(key, hashes.SHA256()).public_bytes(form[0]) + key.private_bytes(*form)
    (tmp_path / "own.pem").write_bytes(pem)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "own.pem")
    listening = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        client = listening.accept()[0]
        with client, suppress(OSError), context.wrap_socket(client, server_side=True) as secured:
            secured.recv(4096)
            secured.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with listening, pytest.raises(PictureError, match="certificate verify failed"):
        local(f"https://a.invalid:{listening.getsockname()[1]}/")
    thread.join(5)


@pytest.mark.parametrize(
    ("head", "why"),
    [("404 Not Found", "answers 404"), ("204 No Content", "answers 204"), ("302 Found", "answers 302"),
     ("200 OK\r\nContent-Encoding: gzip", "compressed"), ("nonsense", "nonsense")],
)  # fmt: skip
def test_other_answers_are_errors(head: str, why: str) -> None:
    with server(says(head)) as (port, _), pytest.raises(PictureError, match=why):
        local(f"http://a.invalid:{port}/")


def test_names_that_do_not_exist_are_errors_of_one_line() -> None:
    def resolve(host: str, port: int) -> list[str]:
        raise socket.gaierror(-2, "Name or service not known")

    with pytest.raises(PictureError, match="not a public address, or not known") as failed:
        fetched("https://nothing.invalid/a.png", resolve)
    assert "\n" not in str(failed.value)
