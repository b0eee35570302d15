"""Connections that send too much, too slowly or nothing, and a server that shuts down, over real sockets."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from fake_service import INFER, FakeService, json_body, listening, pixels

from ttac.serve.app import build_app
from ttac.serve.connections import MOST_CONNECTIONS, MOST_HEADER, TOLD, allowed_connections
from ttac.serve.limits import HttpSettings

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"


@contextmanager
def server(
    seconds: float = 5.0, connections: int = 100, settings: HttpSettings | None = None, delay: float = 0.0
) -> Iterator[int]:
    service = FakeService(delay)
    with listening(build_app(service, settings or HttpSettings()), seconds, connections) as port:
        yield port
    service.batcher.close()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes."""
    received = b""
    try:
        while part := connection.recv(2**16):
            received += part
    except ConnectionResetError:
        pass
    return received


def status(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def error(answer: bytes) -> str:
    (message,) = json.loads(answer.partition(b"\r\n\r\n")[2]).values()
    return str(message)


def ask(connection: socket.socket, request: bytes = GET + b"\r\n") -> bytes:
    """Send a request and give the answer, which fits into one piece."""
    connection.sendall(request)
    return connection.recv(2**16)


def test_an_upgrade_is_passed_over_unless_a_body_would_be_lost_by_it() -> None:
    body = json_body(pixels())
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"
    with server() as port:
        with connected(port) as connection:
            assert status(ask(connection, GET + upgrade + b"\r\n")) == 200
        with connected(port) as connection:
            head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
            answer = ask(connection, head + upgrade + b"\r\n" + body)
            assert status(answer) == 400
            assert error(answer) == "upgrades to other protocols are not offered: send it as plain HTTP/1.1"


def seconds_until_closed(connection: socket.socket, part: bytes, pause: float) -> float:
    """Send the same again and again until the server closes, and give how long that took."""
    started = time.monotonic()
    try:
        while time.monotonic() - started < 8:
            connection.sendall(part)
            time.sleep(pause)
    except OSError:  # a broken pipe or a reset, as the system likes
        return time.monotonic() - started
    pytest.fail("the connection stays open")


@pytest.mark.parametrize("size", [MOST_HEADER + 1, 2**20])
def test_a_large_header_is_refused(size: int) -> None:
    with server() as port, connected(port) as connection:
        try:
            connection.sendall(GET + b"X: " + b"a" * size + b"\r\n\r\n")
        except OSError:
            assert size == 2**20  # closed before all of it was sent
        answer = rest(connection)
        assert not answer or (status(answer) == 431 and str(MOST_HEADER) in error(answer))
        assert answer or size == 2**20
        with connected(port) as other:
            assert status(ask(other, GET + b"X: " + b"a" * (MOST_HEADER - 200) + b"\r\n\r\n")) == 200


def test_a_header_without_end_is_refused_while_it_comes() -> None:
    with server() as port, connected(port) as connection:
        connection.sendall(GET)
        assert seconds_until_closed(connection, b"X: " + b"a" * 1000 + b"\r\n", 0.001) < 4


@pytest.mark.parametrize("trailer", [b"0\r\nX: ", b"1;"])
def test_what_stands_around_the_parts_of_a_body_is_bounded_as_headers_are(trailer: bytes) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with server() as port, connected(port) as connection:
        connection.sendall(head + trailer)
        assert seconds_until_closed(connection, b"a" * 1000, 0.001) < 4


def test_connections_without_a_whole_header_are_closed_in_time() -> None:
    with server(seconds=0.4) as port, connected(port) as silent, connected(port) as half, connected(port) as kept:
        started = time.monotonic()
        half.sendall(b"GET /v2 HT")
        assert status(ask(kept)) == 200
        kept.sendall(GET)  # and no empty line
        assert [rest(connection) for connection in (silent, half, kept)] == [b"", b"", b""]
        assert 0.3 < time.monotonic() - started < 2


def test_a_header_that_drips_has_the_time_of_one_that_does_not_come() -> None:
    with server(seconds=0.4) as port, connected(port) as connection:
        connection.sendall(GET + b"X: ")
        assert 0.3 < seconds_until_closed(connection, b"a", 0.05) < 2


def test_requests_that_take_longer_than_a_header_may_are_answered() -> None:
    body = json_body(pixels())
    request = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with server(seconds=0.2, delay=0.5) as port, connected(port) as connection:
        for _ in range(2):
            assert status(ask(connection, request)) == 200


def test_a_body_that_is_too_large_is_answered_and_the_connection_closed() -> None:
    limits = HttpSettings(max_body=1000)
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n".encode()
    with server(settings=limits) as port:
        # Who sends all of it, as most do, reads why.
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("POST", INFER, b" " * 2**24)
        response = client.getresponse()
        assert (response.status, response.headers["connection"]) == (413, "close")
        with connected(port) as connection:
            connection.sendall(head + b"\r\n")
            started = time.monotonic()
            answer = rest(connection)
            assert status(answer) == 413
            assert time.monotonic() - started < 3
        with connected(port) as connection:
            connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
            assert status(rest(connection)) == 413


def test_a_body_of_a_request_that_was_refused_at_once_does_not_go_on_for_ever() -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    with server() as port, connected(port) as flood, connected(port) as honest:
        assert status(ask(flood, head % 10**12)) == 404
        assert seconds_until_closed(flood, b"a" * 1000, 0.01) < 3
        assert status(ask(honest, head % 10)) == 404
        honest.sendall(b"a" * 10)
        assert status(ask(honest)) == 200


def test_connections_over_the_limit_are_told_or_closed() -> None:
    with server(connections=2) as port, ExitStack() as stack:
        held = [stack.enter_context(connected(port)) for _ in range(2)]
        assert status(ask(held[0])) == 200
        third = stack.enter_context(connected(port))
        answer = ask(third)
        assert (status(answer), error(answer)) == (503, "too many connections: come again")
        assert b"retry-after: 1\r\n" in answer.lower()
        assert rest(third) == b""
        silent = [stack.enter_context(connected(port)) for _ in range(TOLD)]
        assert rest(stack.enter_context(connected(port))) == b""
        for connection in (*silent, held[1]):
            connection.close()
        time.sleep(0.1)
        assert status(ask(held[0])) == 200


def test_a_client_that_does_not_read_is_given_up() -> None:
    with server(seconds=0.4) as port, connected(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        page = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert seconds_until_closed(connection, page * 100, 0.05) < 7


def test_what_is_not_done_when_the_server_ends_is_told_to_come_again() -> None:
    service = FakeService(delay=2.0)
    body = json_body(pixels())
    answers: list[tuple[int, str | None, bytes]] = []

    def slow(port: int) -> None:
        client = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        client.request("POST", INFER, body)
        response = client.getresponse()
        answers.append((response.status, response.headers["retry-after"], response.read()))

    with listening(build_app(service, HttpSettings())) as port:  # a second of grace
        thread = threading.Thread(target=slow, args=(port,))
        thread.start()
        time.sleep(0.3)
    thread.join()
    service.batcher.close()
    assert answers == [(503, "1", b'{"error":"the server is shutting down"}')]
    assert service.taken == []
    assert service.history.summary()["refused"] == 1


def test_the_limit_of_open_files_is_raised_and_bounds_the_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(256, 400), (256, 10**6), (10**6, 10**6), (resource.RLIM_INFINITY, resource.RLIM_INFINITY), (50, 50)]
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[0])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: raised.append(pair))
    allowed = []
    while limits:
        allowed.append(allowed_connections())
        limits.pop(0)
    assert allowed == [400 - 100 - TOLD, MOST_CONNECTIONS, MOST_CONNECTIONS, MOST_CONNECTIONS, 1]
    assert raised == [(400, 400), (1024 + 100 + TOLD, 10**6), (50, 50)]
