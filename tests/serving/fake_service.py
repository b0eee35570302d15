"""A service of a tiny linear model, without an adapter, that remembers what reached it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import uvicorn
from numpy.typing import NDArray
from starlette.testclient import TestClient
from starlette.types import ASGIApp
from torch import Tensor
from waiting import PATIENCE, until

from ttac.serving.app import build_app
from ttac.serving.batcher import Answer, Batcher
from ttac.serving.connections import Connection, bounded
from ttac.serving.errors import RequestError
from ttac.serving.history import History
from ttac.serving.limits import HttpSettings
from ttac.serving.protocol import HEADER_LENGTH, ServedModel

SHAPE = (3, 4, 4)
CLASSES = ("ant", "bee", "cat", "dog", "eel", "fox", "gnu")
WEIGHTS = torch.randn(48, len(CLASSES), generator=torch.Generator().manual_seed(0))
INFER = "/v2/models/tiny/infer"
LOCAL = "http://127.0.0.1"


class FakeService:
    """Answers with `images @ WEIGHTS` as version 5; a pass waits while `gate` is closed. Its block ends the batcher."""

    def __init__(self, **options: Any) -> None:
        self.description = ServedModel("tiny", SHAPE, len(CLASSES), CLASSES, method="ttac++")
        self.history = History(CLASSES)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = 0  # passes that were begun
        self.version = 5
        self.taken: list[Tensor] = []
        self.commands: list[tuple[str, dict[str, Any]]] = []
        self.reply: tuple[int, dict[str, Any]] | RequestError = (200, {"message": "done", "version": 6})
        self.batcher = Batcher(self._predict, taken=self.taken.append, **{"wait": 0.0, **options})

    def __enter__(self) -> FakeService:
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self.batcher.close()

    def _predict(self, images: Tensor) -> Answer:
        self.entered += 1
        assert self.gate.wait(PATIENCE)
        return Answer(images.flatten(1) @ WEIGHTS, self.version)

    def status(self) -> dict[str, Any]:
        counts = {"updates": 9, "rollbacks": 1, "guard_refusals": 4, "resets": 2, "bad_samples": 6}
        adapter = {"up": True, "lag": 3, "dropped": 2, "updates": 99, "since_start": counts}
        measures = {"entropy": {"adapted": 0.5, "source": 0.7, "limit": None}}
        predictor = {"version": 5, "weights_age_seconds": 1.5}
        return {"version": 5, "predictor": predictor, "adapter": adapter, "guard": {"ok": False, "measures": measures}}

    def events(self, count: int) -> list[dict[str, Any]]:
        return [{"event": "start", "message": "began", "time": 1.0}][:count]

    async def command(self, name: str, arguments: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if isinstance(self.reply, RequestError):
            raise self.reply
        self.commands.append((name, arguments))
        return self.reply


@contextmanager
def serving(settings: HttpSettings | None = None, **options: Any) -> Iterator[tuple[FakeService, TestClient]]:
    """Give a service and a client of its application, in this process."""
    with FakeService(**options) as service:
        app = build_app(service, settings or HttpSettings(admin_token="admin"))
        with TestClient(app, base_url=LOCAL, raise_server_exceptions=False) as client:
            yield service, client


@contextmanager
def listening(app: ASGIApp, http: type[Connection] | None = None) -> Iterator[int]:
    """Run a real server in a thread, with limits of its connections or with wide ones, and give its port."""
    config = uvicorn.Config(
        app,
        port=0,
        http=http or bounded(10 * PATIENCE, 100),
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=1,
        timeout_keep_alive=int(10 * PATIENCE),
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        assert server.started
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()


def pixels(count: int = 1, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, *SHAPE), dtype=np.float32)


def expected(images: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The probabilities and labels that the model has for images, by torch."""
    logits = torch.from_numpy(images).flatten(1) @ WEIGHTS
    return logits.softmax(1).numpy(), logits.argmax(1).numpy()


def tensor(images: NDArray[Any], datatype: str = "FP32", **changes: Any) -> dict[str, Any]:
    """The input of a request; changes to None leave a field out."""
    content = {"name": "images", "datatype": datatype, "shape": list(images.shape), "data": images.ravel().tolist()}
    return {key: value for key, value in {**content, **changes}.items() if value is not None}


def json_body(images: NDArray[Any], **fields: Any) -> bytes:
    return json.dumps({"inputs": [tensor(images)], **fields}).encode()


def binary_body(
    images: NDArray[Any], datatype: str = "FP32", *, size: Any = None, **fields: Any
) -> tuple[bytes, dict[str, str]]:
    """A body with the tensor behind the JSON, and the header that says where."""
    raw = images.tobytes()
    parameters = {"binary_data_size": len(raw) if size is None else size}
    head = json.dumps({"inputs": [tensor(images, datatype, data=None, parameters=parameters)], **fields}).encode()
    return head + raw, {HEADER_LENGTH: str(len(head))}
