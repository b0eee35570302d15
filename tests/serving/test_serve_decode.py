"""Work that small requests can ask for: JPEG files of many scans, large JSON, and files that take long."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import INFER, LOCAL, SHAPE, FakeService, binary_body, expected, json_body, listening, pixels, serving
from PIL import Image
from waiting import PATIENCE, until

from ttac.serving import decode, inference, jpeg
from ttac.serving.app import build_app
from ttac.serving.errors import RequestError
from ttac.serving.limits import BodyReader, HttpSettings
from ttac.serving.protocol import ServedModel

MODEL = ServedModel("tiny", SHAPE, 7)


def encoded(**options: Any) -> bytes:
    levels = np.random.default_rng(0).integers(0, 256, (40, 30, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(levels).save(file, "JPEG", **options)
    return file.getvalue()


def with_scans(content: bytes, more: int) -> bytes:
    """Repeat the last scan of a progressive file."""
    last, end = content.rfind(b"\xff\xda"), content.rfind(b"\xff\xd9")
    return content[:end] + content[last:end] * more + content[end:]


def test_scans_are_counted_as_the_decoder_meets_them() -> None:
    plain, progressive = encoded(), encoded(progressive=True)
    assert jpeg.count_scans(plain, 100) == 1
    # The script of libjpeg for three colours has ten scans.
    assert jpeg.count_scans(progressive, 100) == 10
    assert jpeg.count_scans(with_scans(progressive, 23), 100) == 33
    # Markers in a comment or a profile, restarts, fill bytes and what follows the end are no scans.
    profile = b"\xff\xda\0\2" * 500
    assert jpeg.count_scans(encoded(icc_profile=profile, comment=profile), 100) == 1
    assert jpeg.count_scans(encoded(restart_marker_blocks=1), 100) == 1
    assert jpeg.count_scans(plain + with_scans(progressive, 50), 100) == 1
    filled = plain.replace(b"\xff\xda", b"\xff\xff\xff\xda", 1)
    assert jpeg.count_scans(filled, 100) == 1
    assert jpeg.count_scans(b"\xff\xd8\xff\xe0\xff", 100) == 0


def test_files_of_many_scans_or_segments_are_refused_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    progressive = encoded(progressive=True)
    most = with_scans(progressive, decode.MOST_SCANS - 10)
    assert decode.decode_image(most, MODEL, 2**20).shape == (1, *SHAPE)
    monkeypatch.setattr(decode, "opened_image", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(RequestError, match=f"{decode.MOST_SCANS + 1} scans, more than {decode.MOST_SCANS}") as refusal:
        decode.decode_image(with_scans(progressive, decode.MOST_SCANS - 9), MODEL, 2**20)
    assert refusal.value.status_code == 400
    comments = progressive[:2] + b"\xff\xfe\0\2" * 1100 + progressive[2:]
    with pytest.raises(RequestError, match="more than 1024 segments"):
        decode.decode_image(comments, MODEL, 2**20)


def test_scans_behind_a_reserved_marker_are_not_hidden() -> None:
    progressive = encoded(progressive=True)
    last, end = progressive.rfind(b"\xff\xda"), progressive.rfind(b"\xff\xd9")
    hidden = progressive[:end] + b"\xff\x02\xff\xff" + progressive[last:end] * 100 + progressive[end:]
    with pytest.raises(RequestError, match="a reserved marker") as refusal:
        decode.decode_image(hidden, MODEL, 2**20)
    assert refusal.value.status_code == 400


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "GIF"])
def test_formats_whose_headers_do_not_bound_them_are_refused(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8)).save(file, kind)
    with pytest.raises(RequestError, match="not an image of PNG, JPEG, BMP, WEBP"):
        decode.decode_image(file.getvalue(), MODEL, 2**20)


def test_a_strip_is_not_blown_up_beyond_the_limit() -> None:
    file = io.BytesIO()
    Image.new("RGB", (5000, 1)).save(file, "PNG")
    with pytest.raises(RequestError, match="too elongated"):
        decode.decode_image(file.getvalue(), MODEL, 10_000)


def test_files_are_no_images_of_other_channels() -> None:
    with pytest.raises(RequestError, match=r"the model takes 4: send a tensor") as refusal:
        decode.decode_image(encoded(), ServedModel("tiny", (4, 4, 4), 7), 2**20)
    assert refusal.value.status_code == 400


class Watched(bytes):
    """A body that tells when it is gone."""

    gone = threading.Event()

    def __del__(self) -> None:
        self.gone.set()


@pytest.mark.parametrize("path", [INFER, "/predict"])
def test_a_body_is_gone_while_its_answer_is_made(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reading = BodyReader.body

    @asynccontextmanager
    async def watched(*arguments: Any) -> AsyncIterator[bytes]:
        async with reading(*arguments) as body:
            yield Watched(body)

    monkeypatch.setattr(BodyReader, "body", watched)
    with serving() as (service, client):
        gone: list[bool] = []
        answer, Watched.gone = service.batcher._predict, threading.Event()

        def predict(images: Any) -> Any:
            gone.append(Watched.gone.wait(PATIENCE))
            return answer(images)

        service.batcher._predict = predict
        content = encoded() if path == "/predict" else json_body(pixels())
        assert client.post(path, content=content).status_code == 200
    assert gone == [True]


def test_json_has_a_limit_of_its_own() -> None:
    images = pixels(4)
    body = json_body(images)
    raw, headers = binary_body(images)
    with serving(HttpSettings(max_json=len(body) - 1, max_body=2**20)) as (service, client):
        refused = client.post(INFER, content=body)
        assert refused.status_code == 413
        assert "binary extension" in refused.json()["error"]
        assert client.post(INFER, content=raw + bytes(len(body)), headers=headers).status_code == 400
        assert client.post(INFER, content=raw, headers=headers).status_code == 200
    assert len(service.taken) == 1
    with serving(HttpSettings(max_json=len(body))) as (_, client):
        assert client.post(INFER, content=body).status_code == 200


class Gated:
    """Work that lasts until it is let go."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.begun = 0

    def __call__(self, *_: Any) -> Any:
        self.begun += 1
        assert self.gate.wait(PATIENCE)
        return None


def test_a_thread_is_free_when_its_work_ends_and_not_when_it_is_given_up() -> None:
    async def main() -> None:
        workers, long = inference.Workers(1, 2), Gated()
        first, given_up, last = (asyncio.create_task(workers.run(work)) for work in (long, long, lambda: "done"))
        await asyncio.to_thread(until, lambda: long.begun == 1)
        with pytest.raises(RequestError):
            await workers.run(long)
        first.cancel()
        given_up.cancel()
        await asyncio.sleep(0.05)
        assert long.begun == 1
        another = asyncio.create_task(workers.run(lambda: 1 // 0))  # in the place of what was given up
        assert not last.done()
        long.gate.set()
        assert await last == "done"
        with pytest.raises(ZeroDivisionError):
            await another
        assert long.begun == 1

    asyncio.run(main())


def test_files_that_take_long_are_given_up_and_keep_nothing_else_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Gated()
    monkeypatch.setattr(inference, "decode_image", long)
    monkeypatch.setattr(inference, "MOST_UNREAD", 2)
    monkeypatch.setattr(inference, "INLINE_JSON", 0)
    images = pixels()

    async def main(service: FakeService) -> None:
        transport = httpx.ASGITransport(build_app(service, HttpSettings(answer_seconds=2.0)))
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            files = [asyncio.ensure_future(client.post("/predict", content=b"x")) for _ in range(5)]
            while long.begun < inference.FILE_THREADS:
                await asyncio.sleep(0.001)
            tensor = await client.post(INFER, content=json_body(images))
            assert tensor.json()["outputs"][1]["data"] == expected(images)[1].tolist()
            answers = await asyncio.gather(*files)
            assert sorted(answer.status_code for answer in answers) == [429, 503, 503, 503, 503]
            assert all(answer.headers["retry-after"] == "1" for answer in answers)

    with FakeService() as service:
        try:
            asyncio.run(main(service))
        finally:
            long.gate.set()
    assert long.begun == inference.FILE_THREADS
    assert len(service.taken) == 1


def test_a_file_is_given_up_when_its_client_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    long = Gated()
    monkeypatch.setattr(inference, "decode_image", long)
    request = b"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1\r\n\r\nx"
    with FakeService() as service, listening(build_app(service, HttpSettings(answer_seconds=10 * PATIENCE))) as port:

        def is_given_up() -> bool:
            metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE).text
            return 'ttac_requests_total{route="/predict",status="499"} 1.0' in metrics

        try:
            with socket.create_connection(("127.0.0.1", port)) as leaving:
                leaving.sendall(request)
                until(lambda: long.begun == 1)
                assert not is_given_up()
            until(is_given_up)
        finally:
            long.gate.set()
