"""Limits of size, number and time, over connections as clients have them."""

from __future__ import annotations

import asyncio
import socket
import threading
from contextlib import AsyncExitStack
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import INFER, LOCAL, FakeService, expected, json_body, listening, pixels
from waiting import PATIENCE, until

from ttac.serving.app import build_app
from ttac.serving.errors import RequestError
from ttac.serving.limits import HELD_BODIES, BodyReader, HttpSettings


def test_bodies_are_counted_and_not_believed() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 200

    async def ask(content: Any, headers: dict[str, str]) -> int:
        app = build_app(service, HttpSettings(max_body=1000))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
            return (await client.post(INFER, content=content, headers=headers)).status_code

    with FakeService() as service:
        assert asyncio.run(ask(chunks(), {})) == 413
        assert asyncio.run(ask(b" " * 1001, {})) == 413
        assert asyncio.run(ask(chunks(), {"Content-Length": "10"})) == 413
        assert asyncio.run(ask(b"{}", {"Content-Length": "1001"})) == 413
        assert asyncio.run(ask(b"{}", {"Content-Length": "two"})) == 400
        assert asyncio.run(ask(b"{}", {"Content-Length": "-2"})) == 400
        assert asyncio.run(ask(b"{}", {"Content-Encoding": "gzip"})) == 415
        assert asyncio.run(ask(b"{}", {"Content-Encoding": "identity"})) == 400
        assert asyncio.run(ask(b" " * 1000, {})) == 400


def test_not_all_memory_goes_into_bodies() -> None:
    async def main() -> None:
        bodies = BodyReader(limit=100, seconds=5)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * 100}

        async with AsyncExitStack() as held:
            for _ in range(HELD_BODIES):
                await held.enter_async_context(bodies.body(receive, {}))
            with pytest.raises(RequestError) as caught:
                await held.enter_async_context(bodies.body(receive, {}))
            assert caught.value.status_code == 429
            assert bodies.held == 100 * HELD_BODIES
        async with bodies.body(receive, {}) as body:
            assert len(body) == bodies.held == 100
        assert bodies.held == 0

    asyncio.run(main())


def test_a_full_queue_and_a_slow_model_say_when_to_come_again() -> None:
    async def main(service: FakeService) -> list[httpx.Response]:
        transport = httpx.ASGITransport(build_app(service, HttpSettings(answer_seconds=2.0)))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            service.gate.clear()
            requests = []
            for seed, waiting in ((0, 0), (1, 1), (2, 1)):
                requests.append(asyncio.ensure_future(client.post(INFER, content=json_body(pixels(seed=seed)))))
                while service.entered < 1 or service.batcher.waiting < waiting:
                    await asyncio.sleep(0.001)
            responses = list(await asyncio.gather(*requests))
            service.gate.set()
            return responses

    with FakeService(max_batch=1, max_waiting=1) as service:
        responses = asyncio.run(main(service))
    assert [response.status_code for response in responses] == [503, 503, 429]
    assert all(response.headers["retry-after"] == "1" for response in responses)
    # Neither the one that was computed too late nor the one that was withdrawn was answered.
    assert service.taken == []
    assert service.batcher.passes[1] == 1
    assert service.history.summary()["refused"] == 3


def talk(port: int, *parts: bytes) -> bytes:
    """Send parts of a request and give all of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while received := connection.recv(2**16):
            answer += received
        return answer


def post(header: str, body: bytes) -> bytes:
    return f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n{header}\r\n\r\n".encode() + body


def test_slow_and_endless_bodies_over_a_real_connection() -> None:
    with FakeService() as service:
        with listening(build_app(service, HttpSettings(body_seconds=0.4))) as port:
            slow = talk(port, post("Content-Length: 100", b"{"))
            assert b" 408 " in slow.split(b"\r\n")[0]
            assert b'{"error":' in slow
        with listening(build_app(service, HttpSettings(max_body=2**16))) as port:
            chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
            endless = talk(port, post("Transfer-Encoding: chunked", b""), chunk, chunk, chunk)
            assert b" 413 " in endless.split(b"\r\n")[0]
    assert service.entered == 0


def test_clients_that_leave_are_not_computed() -> None:
    body = json_body(pixels())
    request = post(f"Content-Length: {len(body)}", body)
    with FakeService() as service, listening(build_app(service, HttpSettings(answer_seconds=10 * PATIENCE))) as port:

        def has_left(count: int) -> bool:
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).text
            return f'ttac_requests_total{{route="/v2/models/{{name}}/infer",status="499"}} {count}.0' in metrics

        service.gate.clear()
        thread = threading.Thread(target=talk, args=(port, request))
        thread.start()
        try:
            until(lambda: service.entered == 1)
            with socket.create_connection(("127.0.0.1", port)) as leaving:  # during a pass of somebody else
                leaving.sendall(request)
                until(lambda: service.batcher.waiting == 1)
            until(lambda: has_left(1))
            assert service.batcher.waiting == 0
        finally:
            service.gate.set()
            thread.join()
        with socket.create_connection(("127.0.0.1", port)) as leaving:  # before all was sent
            leaving.sendall(post("Content-Length: 100", b"{"))
        until(lambda: has_left(2))
    assert service.batcher.passes[1] == 1
    assert len(service.taken) == 1


def test_the_client_of_triton_works_as_it_is() -> None:
    triton = pytest.importorskip("tritonclient.http")
    errors = pytest.importorskip("tritonclient.utils").InferenceServerException
    images = pixels(4)
    probabilities, labels = expected(images)
    with FakeService() as service, listening(build_app(service, HttpSettings(token="user"))) as port:

        def user() -> dict[str, str]:  # the client adds its own to what it is given
            return {"Authorization": "Bearer user"}

        client = triton.InferenceServerClient(f"127.0.0.1:{port}")
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("tiny", headers=user())
        assert not client.is_model_ready("other", headers=user())
        assert client.get_server_metadata(headers=user())["name"] == "ttac"
        metadata = client.get_model_metadata("tiny", headers=user())
        for binary in (True, False):
            tensor = triton.InferInput(metadata["inputs"][0]["name"], list(images.shape), "FP32")
            tensor.set_data_from_numpy(images, binary_data=binary)
            every = client.infer("tiny", [tensor], request_id="7", headers=user())
            names = [output["name"] for output in metadata["outputs"]]
            wanted = [triton.InferRequestedOutput(name, binary_data=binary) for name in names]
            chosen = client.infer("tiny", [tensor], model_version="", outputs=wanted, headers=user())
            for answer in (every, chosen):
                np.testing.assert_allclose(answer.as_numpy("probabilities"), probabilities, rtol=1e-5)
                assert answer.as_numpy("labels").tolist() == labels.tolist()
            assert (every.get_response()["id"], every.get_response()["model_version"]) == ("7", "5")
            assert every.as_numpy("logits") is None
            np.testing.assert_array_equal(chosen.as_numpy("logits").argmax(1), labels)
        with pytest.raises(errors, match="compressed"):
            client.infer("tiny", [tensor], request_compression_algorithm="gzip", headers=user())
        with pytest.raises(errors, match="token"):
            client.infer("tiny", [tensor])
        client.close()
    assert len(service.taken) == 4
