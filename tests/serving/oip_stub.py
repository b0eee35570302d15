"""A server of the Open Inference Protocol v2 on this machine that behaves as well or as badly as a test wants."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np

from web_server import answering

KINDS = {"UINT8": "<u1", "FP32": "<f4", "INT64": "<i8"}


@dataclass
class Stub:
    """What is served, how the next requests go wrong, and what was asked."""

    predict: Callable[[np.ndarray], np.ndarray]  # pixels [n, C, H, W] in [0, 1] -> logits [n, K]
    shape: tuple[int, int, int]
    classes: list[str] | None
    num_classes: int
    address: str = ""
    name: str = "tiny"
    token: str | None = None
    in_binary: bool = True
    samples_a_version: int | None = None  # after which the next version answers
    # For the next answers of /infer, one each: "lost" after the images arrived, "broken" in the middle, "closed" when
    # the answer is out, or a code.
    faults: list[str | int] = field(default_factory=list)
    lost_questions: int = 0  # of the next ones that are no /infer
    answers: dict[str, bytes] = field(default_factory=dict)  # in the place of the true ones, by path
    requests: list[dict[str, Any]] = field(default_factory=list)  # JSON headers of /infer
    images: list[np.ndarray] = field(default_factory=list)  # that were answered, as they came
    connections: int = 0
    connection_ended: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    restarts: dict[str, int] = field(default_factory=lambda: {"predictor": 0, "adapter": 0})
    dropped: int = 5  # before anything was asked

    @property
    def version(self) -> int:
        """Of the next answer."""
        seen = sum(map(len, self.images))
        return 1 if self.samples_a_version is None else 1 + seen // self.samples_a_version

    def status(self) -> dict[str, Any]:
        """As `ttac serve` tells it."""
        seen = sum(map(len, self.images))
        adapter = {"pid": 1, "up": True, "samples": 100 + seen, "refused_samples": 8, "updates": 9, "lag": 3}
        predictor = {"pid": 2, "version": self.version, "requests": 40, "images": 40 + seen, "refused": 6}
        told = {"predictor": predictor, "adapter": {**adapter, "dropped": self.dropped + seen // 10}}
        counted = {part: {**told[part], "restarts": self.restarts[part]} for part in told}
        return {"name": self.name, "classes": self.classes, **counted}

    def description(self) -> dict[str, Any]:
        """Of the model."""
        outputs = {"probabilities": [-1, self.num_classes], "labels": [-1], "logits": [-1, self.num_classes]}
        return {
            "name": self.name,
            "inputs": [{"name": "images", "datatype": "FP32", "shape": [-1, *self.shape]}],
            "outputs": [{"name": name, "datatype": "FP32", "shape": shape} for name, shape in outputs.items()],
        }

    def infer(self, body: bytes, header_length: int) -> tuple[bytes, int]:
        """Answer a request that came in the binary form: JSON and bytes, and the length of the JSON."""
        header, pixels = json.loads(body[:header_length]), body[header_length:]
        self.requests.append(header)
        (given,) = header["inputs"]
        assert given["parameters"]["binary_data_size"] == len(pixels)
        images = np.frombuffer(pixels, KINDS[given["datatype"]]).reshape(given["shape"])
        scaled = images.astype(np.float32) / (255 if given["datatype"] == "UINT8" else 1)
        logits, version = self.predict(scaled), self.version
        self.images.append(images)
        known = {"labels": ("INT64", logits.argmax(1)), "logits": ("FP32", logits)}
        outputs, tail = [], b""
        for wanted in header["outputs"]:
            datatype, array = known[wanted["name"]]
            array = array.astype(KINDS[datatype])
            output = {"name": wanted["name"], "datatype": datatype, "shape": list(array.shape)}
            if self.in_binary and wanted["parameters"]["binary_data"]:
                output["parameters"] = {"binary_data_size": array.nbytes}
                tail += array.tobytes()
            else:
                output["data"] = array.flatten().tolist()
            outputs.append(output)
        text = json.dumps({"model_name": self.name, "model_version": str(version), "outputs": outputs}).encode()
        return text + tail, len(text)


@contextmanager
def serving(
    predict: Callable[[np.ndarray], np.ndarray], shape: tuple[int, int, int], num_classes: int, **more: Any
) -> Iterator[Stub]:
    """Serve until the block ends."""
    stub = Stub(predict, shape, num_classes=num_classes, **{"classes": None, **more})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def setup(self) -> None:
            stub.connections += 1
            super().setup()

        def finish(self) -> None:
            super().finish()
            self.request.shutdown(socket.SHUT_RDWR)
            stub.connection_ended.release()

        def log_message(self, *_: object) -> None:
            """Stay silent."""

        def do_GET(self) -> None:
            known = {"/status": stub.status, f"/v2/models/{stub.name}": stub.description, "/v2/health/ready": dict}
            if stub.lost_questions > 0:
                stub.lost_questions -= 1
                self.close_connection = True
            elif self.let_in():
                make = known.get(self.path)
                self.answer(200 if make else 404, json.dumps(make() if make else {"error": "nothing here"}).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if not self.let_in():
                return
            if not self.path.endswith("/infer"):
                self.answer(202, body)
                return
            fault = stub.faults.pop(0) if stub.faults else None
            if isinstance(fault, int):
                self.answer(fault, b'{"error": "told to"}', {"Retry-After": "7"})
            elif fault == "lost":
                self.close_connection = True
            else:
                content, length = stub.infer(body, int(self.headers["Inference-Header-Content-Length"]))
                more = {"Inference-Header-Content-Length": str(length)} if stub.in_binary else {}
                self.answer(200, content, more, sent=len(content) // 2 if fault == "broken" else None)
                self.close_connection = fault is not None

        def let_in(self) -> bool:
            right = stub.token is None or self.headers.get("Authorization") == f"Bearer {stub.token}"
            if not right:
                self.answer(401, b'{"error": "no token"}')
            return right

        def answer(
            self, code: int, content: bytes, headers: dict[str, str] | None = None, sent: int | None = None
        ) -> None:
            content = stub.answers.get(self.path, content)
            self.send_response(code)
            for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content[:sent])

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True  # an idle connection may stay open
    stub.address = f"http://127.0.0.1:{server.server_address[1]}"
    with answering(server):
        yield stub
