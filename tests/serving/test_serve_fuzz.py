"""Malformed requests by the thousand: each is refused with a 4xx, and nothing reaches the model's learner."""

from __future__ import annotations

import asyncio
import io
import json
import random
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fake_service import CLASSES, INFER, LOCAL, SHAPE, FakeService, binary_body, pixels, tensor
from PIL import Image
from server_process import ServerProcess, save_tiny_model
from waiting import PATIENCE

from ttac.serving.app import build_app
from ttac.serving.limits import HttpSettings
from ttac.serving.protocol import HEADER_LENGTH

Request = tuple[str, str, bytes, dict[str, str]]  # method, path, body, headers
SETTINGS = HttpSettings(max_body=2**18, max_pixels=10_000)
SCALARS: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    3.5,
    2**63,
    10**400,
    -0.0,
    1e308,
    "",
    "FP32",
    "images",
    "\ud800",
    "\0",
)


def any_value(rng: random.Random, depth: int = 3) -> Any:
    """Make some JSON value."""
    kind = rng.random()
    if depth == 0 or kind < 0.6:
        return rng.choice(SCALARS)
    parts = [any_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return parts if kind < 0.8 else {str(rng.choice(SCALARS)): part for part in parts}


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Walk over all places of a JSON value but the single numbers of tensors."""
    keys = list(value) if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else []
    for key in keys:
        yield value, key
        yield from places(value[key])


def damaged_json(rng: random.Random) -> Request:
    """Replace or remove something that the tensor needs."""
    request: dict[str, Any] = {"inputs": [tensor(pixels(rng.randrange(1, 3)))]}
    data = request["inputs"][0]["data"]
    holder, key = rng.choice(list(places(request)))
    before = holder[key]
    if rng.random() < 0.3:
        del holder[key]
    elif holder is data:
        data[key] = rng.choice([None, True, "0.5", [], [0.5], {}, -1, 2, 10**400, 1e308])
    else:
        holder[key] = any_value(rng)
        if json.dumps(holder[key]) == json.dumps(before):
            del holder[key]
    return "POST", INFER, json.dumps(request).encode(), {}


def damaged_text(rng: random.Random) -> Request:
    """Put a byte that JSON does not have in its place outside of texts, or cut it off."""
    body = bytearray(json.dumps({"inputs": [tensor(pixels())]}).encode())
    if rng.random() < 0.5:
        del body[rng.randrange(len(body)) :]
    else:
        body[rng.randrange(len(body))] = rng.choice(b"\x00\xff\x80")
    return "POST", INFER, bytes(body), {}


def damaged_binary(rng: random.Random) -> Request:
    """Lie about lengths, cut off, or put in pixels that are none."""
    images = pixels()
    body, headers = binary_body(images)
    kind = rng.randrange(5)
    if kind == 0:
        body, headers = binary_body(images, size=rng.choice([-1, 0, 191, 193, 2**70, 1.5, "192", [], True]))
    elif kind == 1:
        headers = {HEADER_LENGTH: str(rng.choice([-1, 0, 1, 10**30, len(body), len(body) + 1, rng.randrange(90)]))}
    elif kind == 2:
        body = body[: rng.randrange(len(body))]
    elif kind == 3:
        body += rng.randbytes(rng.randrange(1, 200))
    else:
        images.reshape(-1)[rng.randrange(images.size)] = rng.choice([np.nan, np.inf, -np.inf, -1e9, 1e38, 2.0, 255.0])
        body, headers = binary_body(images)
    return "POST", INFER, body, headers


def png(width: int, height: int, data: bytes = bytes(1000)) -> bytes:
    """A PNG file whose header says what it likes."""
    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    chunks = b""
    for kind, content in ((b"IHDR", header), (b"IDAT", zlib.compress(data)), (b"IEND", b"")):
        chunks += struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
    return b"\x89PNG\r\n\x1a\n" + chunks


def encoded(kind: str, frames: int = 1) -> bytes:
    file = io.BytesIO()
    images = [Image.fromarray(np.full((8, 8, 3), 40 * number, np.uint8)) for number in range(frames)]
    options: dict[str, Any] = {"save_all": True, "append_images": images[1:]} if frames > 1 else {}
    images[0].save(file, kind, **options)
    return file.getvalue()


FILES = [
    b"",
    b"no image",
    png(60_000, 60_000),
    png(200, 51, bytes(201 * 51)),  # whole, and just over the limit
    png(0, 0),
    png(100, 100, b""),
    png(10_000, 1, b"\0"),
    encoded("PNG", 3),
    encoded("WEBP", 3),
    encoded("TIFF", 3),
    encoded("GIF", 3),
    b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n",
    b'<svg xmlns="http://www.w3.org/2000/svg" width="8" height="8"/>',
    b"P6 8 8 255\n" + bytes(10),
    b"P6 99999999 99999999 255\n",
    b"\xff\xd8\xff\xe0" + bytes(100),
    b"BM" + bytes(60),
    b"II*\0\x08\0\0\0\xff\xff" + bytes(100),
    b"RIFF\xff\xff\xff\xffWEBPVP8 " + bytes(50),
]


def damaged_image(rng: random.Random) -> Request:
    """Send a file that is no whole image."""
    content = rng.choice(FILES)
    if rng.random() < 0.5:
        whole = encoded(rng.choice(["PNG", "TIFF", "BMP", "PPM"]))
        content = whole[: rng.randrange(len(whole) // 2)]
    return "POST", "/predict", content, {"Content-Type": rng.choice(["image/png", "", "text/html", "a/b; c"])}


def part(name: str, content: bytes) -> bytes:
    return f'--x\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n\r\n'.encode() + content + b"\r\n"


def damaged_form(rng: random.Random) -> Request:
    """Send forms without the file, with several, or torn."""
    image = encoded("PNG")
    forms = [
        b"",
        b"--x--\r\n",
        part("file", image) * 2 + b"--x--\r\n",
        part("image", image) + b"--x--\r\n",
        part("note", b"a") + part("file", image) + b"--x--\r\n",
        part("file", b"") + b"--x--\r\n",
        part("file", image),
        part("file", image)[: rng.randrange(1, 60)],
        b"--x\r\n\r\n" + image + b"\r\n--x--\r\n",
        b"--x\r\n" + b"A: b\r\n" * 50 + b"\r\n\r\n--x--\r\n",
        b"--x\r\nContent-Disposition: " + b"a" * 10_000 + b"\r\n\r\n\r\n--x--\r\n",
        b"--x\r\nContent-Disposition: form-data; name*=utf-8''file\r\n\r\n" + image + b"\r\n--x--\r\n",
        rng.randbytes(rng.randrange(300)),
    ]
    boundary = rng.choice(["x"] * 8 + ["", "y", "x" * 500, '"', "\xe9"])
    wrong = boundary != "x"
    body = part("file", image) + b"--x--\r\n" if wrong else rng.choice(forms)
    return "POST", "/predict", body, {"Content-Type": f"multipart/form-data; boundary={boundary}"}


def odd_request(rng: random.Random) -> Request:
    """Ask for what there is not, in ways that there are not."""
    path = rng.choice(
        [
            "/v2/models/tiny/versions/1/infer",
            "/v2/models/..%2f..%2fpredict/infer",
            "/v2/models/tiny%00/infer",
            "/v2/models/%ff%fe/infer",
            "/v2/models//infer",
            "/v2/models/tiny/infer/",
            "/v2/repository/index",
            "/admin/pause",
            "/admin/../predict/x",
            "/events?count=" + rng.choice(["0", "-1", "1e9", "x", "9" * 50, "%00", "1&count=x"]),
            "/" + "a" * 5000,
        ]
    )
    method = "GET" if path.startswith("/events") else rng.choice(["POST", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
    headers = rng.choice([{}, {"Authorization": "Bearer x"}, {"Content-Encoding": "gzip"}, {"Content-Length": "zwei"}])
    return method, path, b"{}", dict(headers)


def refused_before_the_body(rng: random.Random) -> Request:
    """Send what would be right, to the wrong place or too much of it."""
    body, headers = binary_body(pixels())
    wrong = rng.choice(
        [
            {"Content-Encoding": rng.choice(["gzip", "br", "gzip, identity"])},
            {"Host": rng.choice(["evil.example", "127.0.0.1.nip.io", "", "[", "a b", "\xfc"])},
            {"Origin": rng.choice(["null", "http://evil.example", "http://[", "\xfc", "file://"])},
        ]
    )
    if rng.random() < 0.2:
        return "POST", INFER, b" " * (SETTINGS.max_body + 1), {}
    return "POST", INFER, body, {**headers, **wrong}


MAKERS: list[Callable[[random.Random], Request]] = [
    damaged_json,
    damaged_text,
    damaged_binary,
    damaged_image,
    damaged_form,
    odd_request,
    refused_before_the_body,
]


async def send(client: httpx.AsyncClient, request: Request) -> httpx.Response:
    method, path, body, headers = request
    encoded_headers = [(name, value.encode("latin-1")) for name, value in headers.items()]
    # httpx tidies addresses up; what a socket could send is to arrive as it is.
    url = client.base_url.copy_with(raw_path=path.encode())
    return await client.request(method, url, content=body, headers=encoded_headers)


def check_refusals(count: int, seed: int) -> None:
    """Send `count` requests of each kind."""
    rng = random.Random(seed)

    async def main(service: FakeService) -> None:
        transport = httpx.ASGITransport(build_app(service, SETTINGS), raise_app_exceptions=True)
        async with httpx.AsyncClient(transport=transport, base_url=LOCAL) as client:
            for maker in MAKERS:
                for _ in range(count):
                    request = maker(rng)
                    response = await send(client, request)
                    assert 400 <= response.status_code < 500, (maker.__name__, request, response.text)
                    assert list(response.json()) == ["error"], (maker.__name__, request)
            body, headers = binary_body(pixels())
            assert (await client.post(INFER, content=body, headers=headers)).status_code == 200

    with FakeService() as service:
        asyncio.run(main(service))
    # The good one at the end, and nothing else.
    assert [images.shape for images in service.taken] == [(1, *SHAPE)]
    assert sum(service.batcher.passes) == 1
    assert service.batcher.waiting == 0
    assert service.commands == []
    assert service.history.summary()["images"] == 1


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_a_thousand_malformed_requests_are_refused_and_leave_no_trace() -> None:
    check_refusals(150, seed=0)


def test_a_thousand_malformed_requests_change_nothing_of_a_running_server(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny.safetensors", size=SHAPE[1:], classes=CLASSES)
    limits = ("--max-body-mib", "0.25", "--max-pixels", "10000")
    learning = ("--method", "tent", "--no-guard", "--snapshot-every", "3600")  # none of its own, however long it takes
    rng = random.Random(3)
    answered = 0

    async def main(url: str) -> None:
        nonlocal answered
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE) as client:
            for request in [maker(rng) for maker in MAKERS for _ in range(150)]:
                try:
                    response = await send(client, request)
                except httpx.LocalProtocolError:  # too odd for the client to send
                    continue
                assert 400 <= response.status_code < 500, (request, response.text)
                assert list(response.json()) == ["error"], request
                answered += 1

    with ServerProcess(tmp_path / "tiny.safetensors", tmp_path / "state", *limits, *learning) as server:
        server.admin("snapshot")
        before = sorted((path.name, path.read_bytes()) for path in server.state.rglob("*") if path.is_file())
        asyncio.run(main(server.url))
        status = server.status()
        assert status["predictor"]["images"] == status["adapter"]["samples"] == status["adapter"]["lag"] == 0
        assert (status["predictor"]["restarts"], status["adapter"]["restarts"]) == (0, 0)
        assert sorted((path.name, path.read_bytes()) for path in server.state.rglob("*") if path.is_file()) == before
        body, headers = binary_body(pixels())
        assert httpx.post(server.url + INFER, content=body, headers=headers, timeout=PATIENCE).status_code == 200
    assert answered > 1000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_many_thousand_malformed_requests_are_refused() -> None:
    for seed in range(1, 11):
        check_refusals(1000, seed)


def check_api(examples: int) -> None:
    """Ask everything that the description of the API allows, and what it does not."""
    with FakeService() as service:
        ask_everything(service, examples)
    for name, arguments in service.commands:
        assert name in ("pause", "resume", "reset", "rollback", "snapshot")
        assert not arguments or (name == "rollback" and type(arguments["version"]) is int)


def ask_everything(service: FakeService, examples: int) -> None:
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, Phase, given
    from hypothesis import settings as hypothesis_settings

    app = build_app(service, HttpSettings(admin_token="admin"))
    schema = schemathesis.openapi.from_asgi("/openapi.json", app, headers={"Host": "127.0.0.1"})
    operations = [operation.ok() for operation in schema.get_all_operations()]
    assert len(operations) >= 12
    checks = [
        schemathesis.checks.not_a_server_error,
        schemathesis.checks.status_code_conformance,
        schemathesis.checks.content_type_conformance,
        schemathesis.checks.response_schema_conformance,
    ]
    for operation in operations:
        strategy = operation.as_strategy(generation_mode=schemathesis.GenerationMode.POSITIVE)
        strategy |= operation.as_strategy(generation_mode=schemathesis.GenerationMode.NEGATIVE)

        @given(case=strategy)
        @hypothesis_settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            headers = {"Host": "127.0.0.1", "Authorization": "Bearer admin"}
            case.call_and_validate(headers=headers, checks=checks)

        ask()


def test_nothing_that_the_api_describes_breaks_the_server() -> None:
    check_api(4)


@pytest.mark.slow
def test_nothing_that_the_api_describes_breaks_the_server_at_length() -> None:
    check_api(300)
