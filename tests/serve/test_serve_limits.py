"""Limits of size, number and time, over connections as clients have them."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import INFER, LOCAL, FakeService, expected, json_body, listening, pixels

from ttac.serve.app import build_app
from ttac.serve.limits import HELD_BODIES, BodyReader, HttpSettings


def test_bodies_are_counted_and_not_believed() -> None:
    async def chunks() -> Any:
        for _ in range(10):
            yield b" " * 200

    async def ask(content: Any, headers: dict[str, str]) -> int:
        app = build_app(service, HttpSettings(max_body=1000))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
            return (await client.post(INFER, content=content, headers=headers)).status_code

    service = FakeService()
    assert asyncio.run(ask(chunks(), {})) == 413
    assert asyncio.run(ask(b" " * 1001, {})) == 413
    assert asyncio.run(ask(chunks(), {"Content-Length": "10"})) == 413
    assert asyncio.run(ask(b"{}", {"Content-Length": "1001"})) == 413
    assert asyncio.run(ask(b"{}", {"Content-Length": "two"})) == 400
    assert asyncio.run(ask(b"{}", {"Content-Length": "-2"})) == 400
    assert asyncio.run(ask(b"{}", {"Content-Encoding": "gzip"})) == 415
    assert asyncio.run(ask(b"{}", {"Content-Encoding": "identity"})) == 400
    assert asyncio.run(ask(b" " * 1000, {})) == 400
    service.batcher.close()


def test_not_all_memory_goes_into_bodies() -> None:
    async def main() -> None:
        bodies = BodyReader(limit=100, seconds=5)

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b" " * 100}

        held = [await bodies.read(receive, {}) for _ in range(HELD_BODIES)]
        with pytest.raises(Exception, match="too many large requests"):
            await bodies.read(receive, {})
        assert bodies.held == 100 * HELD_BODIES
        bodies.release(len(held.pop()))
        assert len(await bodies.read(receive, {})) == 100

    asyncio.run(main())


def test_a_full_queue_and_a_slow_model_say_when_to_come_again() -> None:
    settings = HttpSettings(answer_seconds=0.3)
    service = FakeService(delay=0.8, max_batch=1, max_waiting=1)
    app = build_app(service, settings)

    async def main() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=LOCAL) as client:
            requests = []
            for seed in range(3):
                requests.append(asyncio.ensure_future(client.post(INFER, content=json_body(pixels(seed=seed)))))
                await asyncio.sleep(0.05)
            return list(await asyncio.gather(*requests))

    responses = asyncio.run(main())
    assert [response.status_code for response in responses] == [503, 503, 429]
    assert all(response.headers["retry-after"] == "1" for response in responses)
    service.batcher.close()
    # Neither the one that was computed too late nor the one that was withdrawn was answered.
    assert service.taken == []
    assert service.batcher.passes[1] == 1
    assert service.history.summary()["refused"] == 3


def talk(port: int, *parts: bytes, pause: float = 0.0) -> bytes:
    """Send parts of a request and give all of the answer."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        for part in parts:
            connection.sendall(part)
            time.sleep(pause)
        answer = b""
        while received := connection.recv(2**16):
            answer += received
        return answer


def test_slow_endless_and_broken_bodies_over_a_real_connection() -> None:
    service = FakeService(delay=0.5)
    app = build_app(service, HttpSettings(max_body=2**16, body_seconds=0.4))
    head = f"POST {INFER} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n".encode()
    with listening(app) as port:
        slow = talk(port, head + b"Content-Length: 100\r\n\r\n", b"{", pause=0.1)
        assert b" 408 " in slow.split(b"\r\n")[0]
        assert b'{"error":' in slow
        chunk = b"8000\r\n" + b" " * 0x8000 + b"\r\n"
        endless = talk(port, head + b"Transfer-Encoding: chunked\r\n\r\n", chunk, chunk, chunk)
        assert b" 413 " in endless.split(b"\r\n")[0]
        # A client that leaves during a pass of somebody else is not computed.
        body = json_body(pixels())
        request = head + f"Content-Length: {len(body)}\r\n\r\n".encode() + body
        threads = [threading.Thread(target=talk, args=(port, request))]
        threads[0].start()
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(request)
            time.sleep(0.15)
        threads[0].join()
        time.sleep(0.1)
        with socket.create_connection(("127.0.0.1", port)) as leaving:
            leaving.sendall(head + b"Content-Length: 100\r\n\r\n{")
        time.sleep(0.1)
        metrics = httpx.get(f"http://127.0.0.1:{port}/metrics").text
        assert 'ttac_requests_total{route="/v2/models/{name}/infer",status="499"} 2.0' in metrics
    service.batcher.close()
    assert service.batcher.passes[1] == 1
    assert len(service.taken) == 1


def test_the_client_of_triton_works_as_it_is() -> None:
    triton = pytest.importorskip("tritonclient.http")
    errors = pytest.importorskip("tritonclient.utils").InferenceServerException
    service = FakeService()
    images = pixels(4)
    probabilities, labels = expected(images)
    with listening(build_app(service, HttpSettings(token="user"))) as port:

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
    service.batcher.close()
    assert len(service.taken) == 4
