"""From the body of a request to its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from ttac.serving.batcher import Answer, Batcher, BusyError, ClosedError, OtherVersionError, TooManyImagesError
from ttac.serving.decode import decode_image, uploaded_file
from ttac.serving.errors import RequestError, client_gone, come_again
from ttac.serving.history import History
from ttac.serving.limits import BodyReader, HttpSettings
from ttac.serving.metrics import Metrics
from ttac.serving.middleware import json_response
from ttac.serving.protocol import (
    HEADER_LENGTH,
    InferRequest,
    Prediction,
    ServedModel,
    format_answer,
    json_length,
    parse_request,
)
from ttac.serving.workers import Workers

# Larger ones are read in a thread; for smaller ones the way there takes longer. Reading JSON holds Python's lock, in a
# thread as well, and everybody waits for it: `max_json` is what bounds that.
INLINE_BINARY = 2**20
INLINE_JSON = 2**13
# Files and tensors have threads of their own, so that neither can keep the other waiting.
FILE_THREADS = 2
TENSOR_THREADS = 1
# That many small files are read in a moment; large ones meet the time limit first.
MOST_UNREAD = 64
PATIENCE = 0.05  # seconds after which a request is watched
LENGTH_KEY = HEADER_LENGTH.lower().encode()
TOP = 5

Result = TypeVar("Result")


class Inference:
    """Reads, decodes, asks the batcher, notes what came of it, and writes the answer."""

    def __init__(
        self, model: ServedModel, batcher: Batcher, history: History, metrics: Metrics, settings: HttpSettings
    ) -> None:
        self.model = model
        self.batcher = batcher
        self._history = history
        self._settings = settings
        self._metrics = metrics
        self._bodies = BodyReader(settings.max_body, settings.body_seconds)
        self._files = Workers(FILE_THREADS, MOST_UNREAD)
        self._tensors = Workers(TENSOR_THREADS, MOST_UNREAD)

    async def infer(self, request: Request, version: int | None = None) -> Response:
        """Answer a request of the protocol, with weights of `version` alone where that is given."""
        wanted, started = await self._read_tensors(request)
        prediction, answered_by = await self._answered(request, wanted.images, started, version)
        content, split_answer = format_answer(wanted, prediction, self.model, answered_by)
        if split_answer is None:
            return Response(content, media_type="application/json")
        return Response(content, media_type="application/octet-stream", headers={HEADER_LENGTH: str(split_answer)})

    async def predict(self, request: Request) -> Response:
        """Answer a request with an image file."""
        images, started = await self._read_file(request)
        prediction, version = await self._answered(request, images, started)
        return json_response(_best(prediction, self.model, version))

    # Both give the time from which on the answer counts; their bodies are gone when they return.

    async def _read_tensors(self, request: Request) -> tuple[InferRequest, float]:
        headers = dict(request.scope["headers"])
        body = await self._bodies.read(request.receive, headers)
        started = time.perf_counter()
        try:
            self._check_room()
            split = json_length(headers.get(LENGTH_KEY), len(body))
            return await self._parsed(request, body, split, started), started
        finally:
            self._bodies.release(len(body))

    async def _read_file(self, request: Request) -> tuple[Tensor, float]:
        headers = dict(request.scope["headers"])
        body = await self._bodies.read(request.receive, headers)
        started = time.perf_counter()

        def decode() -> Tensor:
            file = uploaded_file(body, headers.get(b"content-type", b""))
            return decode_image(file, self.model, self._settings.max_pixels)

        try:
            self._check_room()
            return await self._worked(self._files, decode, request, started), started
        finally:
            self._bodies.release(len(body))

    async def _parsed(self, request: Request, body: bytes, split: int, started: float) -> InferRequest:
        if split > self._settings.max_json:
            limit = f"{split} bytes of JSON are more than {self._settings.max_json}"
            way = f"send fewer images, or the tensor with the binary extension of the protocol ({HEADER_LENGTH})"
            raise RequestError(413, f"{limit}: {way}")

        def parse() -> InferRequest:
            return parse_request(body, split, self.model, self.batcher.max_batch)

        if split <= INLINE_JSON and len(body) <= INLINE_BINARY:
            return parse()
        return await self._worked(self._tensors, parse, request, started)

    def _check_room(self) -> None:
        """Refuse before the work of decoding where there is no room anyway."""
        if self.batcher.full:
            raise come_again(429, f"{self.batcher.waiting} images wait already: come again")

    async def _worked(self, workers: Workers, work: Callable[[], Result], request: Request, started: float) -> Result:
        try:
            future = workers.submit(work)
        except BusyError as error:
            raise come_again(429, str(error)) from error
        return await self._watched(request, future, started)

    async def _answered(
        self, request: Request, images: Tensor, started: float, version: int | None = None
    ) -> tuple[Prediction, int]:
        try:
            answer = await self._watched(request, self._submitted(images, version), started)
        except RequestError:
            raise
        except OtherVersionError as error:
            raise RequestError(409, str(error)) from error
        except Exception as error:  # the batcher has logged it
            raise RequestError(500, "the model failed on this batch; the log says why") from error
        prediction = Prediction.of(answer.logits)
        confidence = prediction.confidence
        self._metrics.predictions(prediction.labels, confidence)
        self._history.record(time.perf_counter() - started, prediction.labels, confidence, answer.version)
        return prediction, answer.version

    def _submitted(self, images: Tensor, version: int | None) -> asyncio.Future[Answer]:
        try:
            return self.batcher.submit(images, version)
        except BusyError as error:
            raise come_again(429, str(error)) from error
        except ClosedError as error:
            raise come_again(503, str(error)) from error
        except TooManyImagesError as error:
            raise RequestError(413, str(error)) from error

    async def _watched(self, request: Request, future: asyncio.Future[Result], started: float) -> Result:
        """Wait for a part of the work on a request, for all of which there is one time limit from `started` on."""
        watch = _Watch(request, future, self._settings.answer_seconds, started)
        try:
            return await future
        except asyncio.CancelledError:
            if watch.reason is None:
                raise
            raise watch.reason from None
        finally:
            watch.end()


class _Watch:
    """Cancels a future when its client goes away or its time is up, and tells the reason.

    Most answers come before it begins to look, as looking has its cost.
    """

    def __init__(self, request: Request, future: asyncio.Future[Any], seconds: float, started: float) -> None:
        self.reason: RequestError | None = None
        self._request = request
        self._future = future
        self._seconds = seconds
        self._started = started
        self._task: asyncio.Task[None] | None = None
        self._timer = asyncio.get_running_loop().call_later(min(PATIENCE, self._left), self._begin)

    @property
    def _left(self) -> float:
        return max(self._started + self._seconds - time.perf_counter(), 0.0)

    def end(self) -> None:
        """Look no longer."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _begin(self) -> None:
        self._task = asyncio.ensure_future(self._look())

    async def _look(self) -> None:
        try:
            await asyncio.wait_for(self._client_gone(), self._left)
            self.reason = client_gone()
        except asyncio.TimeoutError:
            self.reason = come_again(503, f"no answer within {self._seconds:g} seconds: come again")
        self._future.cancel()

    async def _client_gone(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def _best(prediction: Prediction, model: ServedModel, version: int) -> dict[str, Any]:
    probabilities = prediction.probabilities[0].tolist()
    # By the logits, of which two may differ and have the same probability.
    numbers = np.argsort(-prediction.logits[0], kind="stable")[:TOP].tolist()
    top = [{"label": model.label(number), "class": number, "probability": probabilities[number]} for number in numbers]
    return {
        "label": top[0]["label"],
        "class": top[0]["class"],
        "confidence": top[0]["probability"],
        "top": top,
        "model_version": str(version),
    }
