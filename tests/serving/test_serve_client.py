"""The client of the Open Inference Protocol: what it sends and reads, and what it makes of a server's troubles."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
from oip_stub import Stub, serving

from ttac.serving.client import InferenceClient, RefusedError

SHAPE, CLASSES = (2, 4, 4), 3
LEVELS = np.random.default_rng(0).integers(0, 256, (5, *SHAPE), dtype=np.uint8)
WEIGHTS = np.random.default_rng(1).normal(size=(np.prod(SHAPE), CLASSES)).astype(np.float32)


def linear(pixels: np.ndarray) -> np.ndarray:
    return pixels.reshape(len(pixels), -1) @ WEIGHTS


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serving(linear, SHAPE, CLASSES) as running:
        yield running


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that the client asked to sleep, which it does not."""
    noted: list[float] = []
    monkeypatch.setattr("ttac.serving.client.time.sleep", noted.append)
    return noted


@pytest.mark.parametrize("in_binary", [True, False])
@pytest.mark.parametrize("kind", [np.uint8, np.float32])
def test_images_go_out_and_answers_come_back(stub: Stub, kind: type, in_binary: bool) -> None:
    stub.in_binary = in_binary
    images = LEVELS if kind is np.uint8 else LEVELS.astype(np.float32) / 255
    with InferenceClient(stub.address) as client:
        for count in (5, 1):
            answer = client.infer("tiny", images[:count], ("labels", "logits"))
            expected = linear(LEVELS[:count].astype(np.float32) / 255)
            np.testing.assert_allclose(answer.outputs["logits"], expected, rtol=1e-6)
            np.testing.assert_array_equal(answer.outputs["labels"], expected.argmax(1))
            assert answer.outputs["labels"].dtype == np.int64
            assert answer.version == "1"
        flipped = client.infer("tiny", images[..., ::-1])  # whose memory is not in order
    np.testing.assert_array_equal(stub.images[2], images[..., ::-1])
    assert list(flipped.outputs) == ["labels"]
    assert stub.connections == 1
    assert (client.resent, client.refused) == (0, 0)


def test_a_request_is_that_of_triton(stub: Stub) -> None:
    triton = pytest.importorskip("tritonclient.http")
    pixels = LEVELS.astype(np.float32) / 255
    given = triton.InferInput("images", list(pixels.shape), "FP32")
    given.set_data_from_numpy(pixels, binary_data=True)
    wanted = [triton.InferRequestedOutput(name, binary_data=True) for name in ("labels", "logits")]
    body, length = triton.InferenceServerClient.generate_request_body([given], outputs=wanted)
    with InferenceClient(stub.address) as client:
        client.infer("tiny", pixels, ("labels", "logits"))
    assert stub.requests == [json.loads(body[:length])]
    assert stub.images[0].tobytes() == body[length:]


def test_a_connection_that_was_closed_while_idle_is_no_loss(stub: Stub) -> None:
    stub.faults = ["closed", "closed"]
    with InferenceClient(stub.address) as client:
        for connections in (1, 2):
            client.infer("tiny", LEVELS)
            assert stub.connections == connections
            stub.connection_ended.acquire(timeout=10)
        client.infer("tiny", LEVELS)
    assert (client.resent, stub.connections) == (0, 3)
    assert [len(images) for images in stub.images] == [5, 5, 5]


def test_proxies_of_the_environment_are_not_asked(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:1")
    assert InferenceClient(stub.address).ready()


@pytest.mark.parametrize("code", [429, 503])
def test_a_busy_server_is_left_alone_as_long_as_it_asks(stub: Stub, waits: list[float], code: int) -> None:
    stub.faults = [code, code]
    with InferenceClient(stub.address, patience=30) as client:
        client.infer("tiny", LEVELS)
        assert (waits, client.refused, client.resent) == ([7.0, 7.0], 2, 0)
        client.patience = 6.0  # less than the server asks for
        stub.faults = [code]
        with pytest.raises(RefusedError, match=rf"refuses requests \({code}, told to\)") as raised:
            client.infer("tiny", LEVELS)
    assert (raised.value.status, raised.value.retry_after) == (code, 7.0)
    assert len(waits) == 2


@pytest.mark.parametrize("fault", ["lost", "broken"])
def test_a_lost_answer_is_asked_for_again(stub: Stub, waits: list[float], fault: str) -> None:
    said: list[str] = []
    stub.faults = [fault, fault]
    with InferenceClient(stub.address, patience=30, note=said.append) as client:
        answer = client.infer("tiny", LEVELS)
        np.testing.assert_array_equal(answer.outputs["labels"], linear(LEVELS / np.float32(255)).argmax(1))
        assert (client.resent, client.refused) == (2, 0)
        assert waits == [0.05, 0.1]
        assert len(said) == 1
        assert said[0].endswith("is the server running? Trying again for 30 s")
        client.patience = 0.0
        stub.faults = [fault]
        with pytest.raises(ConnectionError, match="is the server running"):
            client.infer("tiny", LEVELS)


def test_a_server_that_is_away_or_silent() -> None:
    with serving(linear, SHAPE, CLASSES) as stub:
        assert InferenceClient(stub.address).ready()
    gone = InferenceClient(stub.address)
    assert not gone.ready()
    with pytest.raises(ConnectionError, match="Connection refused"):
        gone.get("/status")
    with serving(linear, SHAPE, CLASSES) as stub:
        silent = InferenceClient(stub.address, timeout=0.05)
        release = threading.Event()

        def late(pixels: np.ndarray) -> np.ndarray:
            release.wait(10)
            return linear(pixels)

        stub.predict = late
        with pytest.raises(ConnectionError, match=r"did not answer within 0\.05 s"):
            silent.infer("tiny", LEVELS)
        release.set()


def test_tokens(stub: Stub) -> None:
    stub.token = "secret"
    with pytest.raises(ValueError, match=r"does not let us in \(401, no token\): name the file .* --token-file"):
        InferenceClient(stub.address).get("/status")
    with pytest.raises(ValueError, match="it wants another token"):
        InferenceClient(stub.address, token="wrong").infer("tiny", LEVELS)
    assert InferenceClient(stub.address, token="secret").get("/status")["name"] == "tiny"
    assert InferenceClient(stub.address, token="secret").post("/admin/pause", {"a": 1}) == {"a": 1}


def test_answers_of_something_else(stub: Stub) -> None:
    stub.in_binary = False
    client = InferenceClient(stub.address)
    with pytest.raises(ValueError, match=r"/nowhere answers 404, nothing here: is this the address of ttac serve\?"):
        client.get("/nowhere")
    for content, message in ((b"<html>", "is not JSON"), (b"[1]", "is not a JSON object")):
        stub.answers["/status"] = content
        with pytest.raises(ValueError, match=message):
            client.get("/status")
    label = {"name": "labels", "datatype": "INT64", "shape": [5], "data": [0] * 5}
    for outputs in (
        [{**label, "shape": [6]}],
        [{**label, "shape": [1, 5]}],
        [{**label, "datatype": "BYTES"}],
        [{**label, "name": "other"}],
        [{**label, "parameters": {"binary_data_size": 40}}],  # and nothing comes
        [],
        7,
    ):
        stub.answers["/v2/models/tiny/infer"] = json.dumps({"model_version": "1", "outputs": outputs}).encode()
        with pytest.raises(ValueError, match="not of the Open Inference Protocol"):
            client.infer("tiny", LEVELS)


def test_an_answer_without_end_is_not_read_to_its_end(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttac.serving.client.LARGEST_ANSWER", 100)
    stub.answers["/status"] = b" " * 101
    with pytest.raises(ValueError, match="more than 100 bytes"):
        InferenceClient(stub.address).get("/status")


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1", "127.0.0.1:8000", "ftp://host", "http://", "http://h:x", "http://[::"]
)
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(ValueError, match="is no address of a server: write it as http://"):
        InferenceClient(url)


def test_images_that_are_none(stub: Stub) -> None:
    client = InferenceClient(stub.address)
    for images in (LEVELS[0], LEVELS.astype(np.int32)):
        with pytest.raises(ValueError, match=r"expected uint8 or floats \[N, C, H, W\]"):
            client.infer("tiny", images)
    assert not stub.requests


def test_no_torch_is_needed() -> None:
    code = "import sys, ttac.serving.client; print({'torch', 'fastapi'} & set(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONPATH": ":".join(sys.path)}
    )
    assert ended.stdout == "set()\n"
