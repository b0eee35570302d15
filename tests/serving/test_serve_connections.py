"""Connections that send too much, too slowly or nothing, and a server that shuts down, over real sockets."""

from __future__ import annotations

import http.client
import json
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

import pytest
from fake_service import INFER, FakeService, json_body, listening, pixels
from waiting import PATIENCE, until

from ttac.serving import connections, limits
from ttac.serving.app import build_app
from ttac.serving.connections import MOST_CONNECTIONS, MOST_HEADER, TOLD, Connection, allowed_connections, bounded
from ttac.serving.limits import HttpSettings

GET = b"GET /v2/health/live HTTP/1.1\r\nHost: 127.0.0.1\r\n"


NEVER = 10 * PATIENCE  # seconds: what ends within a test does so for another reason


@contextmanager
def server(http: type[Connection] | None = None, settings: HttpSettings | None = None) -> Iterator[int]:
    """Run a server whose connections have all the time in the world, if not told otherwise."""
    with FakeService() as service, listening(build_app(service, settings or HttpSettings()), http) as port:
        yield port


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)


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
    """Send a request and give the whole answer, in however many pieces it comes."""
    connection.sendall(request)
    response = http.client.HTTPResponse(connection)
    response.begin()
    head = "".join(f"{name}: {value}\r\n" for name, value in response.getheaders())
    return f"HTTP/1.1 {response.status} {response.reason}\r\n{head}\r\n".encode() + response.read()


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


def bytes_until_closed(connection: socket.socket, part: bytes, pause: float) -> int:
    """Send the same again and again until the server closes, and give how many bytes that took."""
    sent, until = 0, time.monotonic() + PATIENCE
    try:
        while time.monotonic() < until:
            connection.sendall(part)
            sent += len(part)
            time.sleep(pause)
    except (BrokenPipeError, ConnectionResetError):  # as the system likes
        return sent
    pytest.fail("the connection stays open")


def is_open(connection: socket.socket) -> bool:
    """Tell whether the server has not closed a connection on which nothing comes."""
    connection.setblocking(False)
    try:
        return connection.recv(1) != b""
    except BlockingIOError:
        return True
    except ConnectionResetError:
        return False


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
        assert bytes_until_closed(connection, b"X: " + b"a" * 1000 + b"\r\n", 0.001) > MOST_HEADER - 2000


@pytest.mark.parametrize("trailer", [b"0\r\nX: ", b"1;"])
def test_what_stands_around_the_parts_of_a_body_is_bounded_as_headers_are(trailer: bytes) -> None:
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with server() as port, connected(port) as connection:
        connection.sendall(head + trailer)
        assert bytes_until_closed(connection, b"a" * 1000, 0.001) > MOST_HEADER - 2000


def without_a_whole_header(stack: ExitStack, seconds: float) -> list[socket.socket]:
    """Open connections of all kinds to a server that gives them so much time."""
    http = bounded(NEVER, 100)
    port = stack.enter_context(server(http))
    kept = stack.enter_context(connected(port))
    assert status(ask(kept)) == 200
    http.header_seconds = seconds  # not before, as nobody knows how soon a busy machine lets one ask
    silent, half = (stack.enter_context(connected(port)) for _ in range(2))
    half.sendall(b"GET /v2 HT")
    kept.sendall(GET)  # and no empty line
    return [silent, half, kept]


def test_connections_without_a_whole_header_are_closed_in_time() -> None:
    with ExitStack() as stack:
        patient = without_a_whole_header(stack, NEVER)
        started = time.monotonic()
        hasty = without_a_whole_header(stack, 0.4)
        assert [rest(connection) for connection in hasty] == [b"", b"", b""]
        assert time.monotonic() - started > 0.39
        assert all(is_open(connection) for connection in patient), "they are closed for want of time alone"


def test_a_header_that_drips_has_the_time_of_one_that_does_not_come() -> None:
    started = time.monotonic()
    with server(bounded(0.4, 100)) as port, connected(port) as dripping, connected(port) as silent:
        ended = threading.Event()

        def drip() -> None:
            while not ended.is_set():
                try:
                    dripping.sendall(b"a")
                except OSError:
                    return
                time.sleep(0.02)

        dripping.sendall(GET + b"X: ")
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert rest(silent) == b""
            assert time.monotonic() - started > 0.39
            assert not is_open(dripping), "it came before the one that is closed"
        finally:
            ended.set()
            thread.join()


def test_requests_that_take_longer_than_a_header_may_are_answered() -> None:
    body = json_body(pixels())
    request = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    with ExitStack() as stack:
        service = stack.enter_context(FakeService())
        app = build_app(service, HttpSettings(answer_seconds=NEVER))
        port = stack.enter_context(listening(app, bounded(1.0, 100)))
        connection = stack.enter_context(connected(port))
        for number in (1, 2):
            service.gate.clear()
            connection.sendall(request)
            until(lambda number=number: service.entered == number)  # type: ignore[misc]
            with connected(port) as silent:
                assert rest(silent) == b""  # so that the time of a header is over
            service.gate.set()
            assert status(ask(connection, b"")) == 200


def test_a_body_that_is_too_large_is_answered_and_the_connection_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = HttpSettings(max_body=1000, body_seconds=NEVER)
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999\r\n".encode()
    with server(settings=settings) as port:
        # Who sends all of it, as most do, reads why.
        monkeypatch.setattr(limits, "DISCARD_SECONDS", NEVER)
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client:
            client.request("POST", INFER, b" " * 2**24)
            response = client.getresponse()
            assert (response.status, response.headers["connection"]) == (413, "close")
        monkeypatch.setattr(limits, "DISCARD_SECONDS", 0.2)
        with connected(port) as connection:
            connection.sendall(head + b"\r\n")
            assert status(rest(connection)) == 413
        with connected(port) as connection:
            connection.sendall(head + b"Expect: 100-continue\r\n\r\n")
            assert status(rest(connection)) == 413


def test_a_body_of_a_request_that_was_refused_at_once_does_not_go_on_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n"
    with server() as port, connected(port) as flood, connected(port) as honest:
        monkeypatch.setattr(connections, "DISCARD_SECONDS", NEVER)
        assert status(ask(honest, head % 10)) == 404
        honest.sendall(b"a" * 10)
        assert status(ask(honest)) == 200
        monkeypatch.setattr(connections, "DISCARD_SECONDS", 0.2)
        assert status(ask(flood, head % 10**12)) == 404
        assert bytes_until_closed(flood, b"a" * 1000, 0.01)
        assert status(ask(honest)) == 200


def test_connections_over_the_limit_are_told_or_closed() -> None:
    with server(bounded(NEVER, 2)) as port, ExitStack() as stack:
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

        def newcomer_is_answered() -> bool:
            with connected(port) as newcomer:
                return status(ask(newcomer)) == 200

        until(newcomer_is_answered)
        assert status(ask(held[0])) == 200


def test_a_client_that_does_not_read_is_given_up() -> None:
    with server(bounded(0.4, 100)) as port, connected(port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        page = b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
        assert bytes_until_closed(connection, page * 100, 0.05)


def test_what_is_not_done_when_the_server_ends_is_told_to_come_again() -> None:
    body = json_body(pixels())
    answers: list[tuple[int, str | None, bytes]] = []

    def slow(port: int) -> None:
        with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)) as client:
            client.request("POST", INFER, body)
            response = client.getresponse()
            answers.append((response.status, response.headers["retry-after"], response.read()))

    with FakeService() as service:
        service.gate.clear()
        with listening(build_app(service, HttpSettings(answer_seconds=NEVER))) as port:  # a second of grace
            thread = threading.Thread(target=slow, args=(port,))
            thread.start()
            until(lambda: service.entered == 1)
        thread.join()
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
