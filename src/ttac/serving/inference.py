"""From the body of a request to its answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import Response
from torch import Tensor

from ttac.serving import protocol
from ttac.serving.decode import decode_image, uploaded_file
from ttac.serving.errors import RequestError, client_gone, come_again
from ttac.serving.limits import BodyReader, HttpSettings
from ttac.serving.metrics import Metrics
from ttac.serving.middleware import json_response
from ttac.serving.protocol import HEADER_LENGTH, InferRequest, Prediction, ServedModel
from ttac.serving.service import PredictorService

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


class Workers:
    """Runs functions for one event loop, `threads` at a time and in the order they came; `most_waiting` may wait.

    A function that waits is forgotten when its task is cancelled. One that runs cannot be stopped: it keeps its
    thread until it ends, so that there are never more than `threads` of them, whoever gave up on it.

    >>> asyncio.run(Workers(1, 4).run(lambda: 6 * 7))
    42
    """

    def __init__(self, threads: int, most_waiting: int) -> None:
        self._most_waiting = most_waiting
        self._waiting = 0
        # Before the pool, whose own queue would hold on to what was cancelled.
        self._free = asyncio.Semaphore(threads)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="ttac-decoder")

    async def run(self, work: Callable[[], Result]) -> Result:
        """Run a function when a thread is free, and give its result; refuse it where too many wait."""
        if self._free.locked() and self._waiting >= self._most_waiting:
            raise come_again(429, f"{self._waiting} requests wait to be decoded already: come again")
        self._waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._waiting -= 1
        loop = asyncio.get_running_loop()
        future = self._pool.submit(work)
        future.add_done_callback(lambda _: self._release(loop))
        return await asyncio.wrap_future(future)

    def _release(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(self._free.release)


class Inference:
    """Reads, decodes, asks the batcher, notes what came of it, and writes the answer."""

    def __init__(self, service: PredictorService, metrics: Metrics, settings: HttpSettings) -> None:
        self.model, self.batcher, self._history = service.description, service.batcher, service.history
        self._settings = settings
        self._metrics = metrics
        self._bodies = BodyReader(settings.max_body, settings.body_seconds)
        self._files = Workers(FILE_THREADS, MOST_UNREAD)
        self._tensors = Workers(TENSOR_THREADS, MOST_UNREAD)

    async def infer(self, request: Request, version: int | None = None) -> Response:
        """Answer a request of the protocol, with weights of `version` alone where that is given."""
        wanted, started = await self._read_tensors(request)
        prediction, answered_by = await self._answered(request, wanted.images, started, version)
        content, split_answer = protocol.format_answer(wanted, prediction, self.model, answered_by)
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
        async with self._bodies.body(request.receive, headers) as body:
            started = time.perf_counter()
            self.batcher.check_room()  # rather now than after the work of reading
            split = protocol.json_length(headers.get(LENGTH_KEY), len(body))
            if split > self._settings.max_json:
                limit = f"{split} bytes of JSON are more than {self._settings.max_json}"
                way = f"send fewer images, or the tensor with the binary extension of the protocol ({HEADER_LENGTH})"
                raise RequestError(413, f"{limit}: {way}")
            parse = partial(protocol.parse_request, body, split, self.model, self.batcher.max_batch)
            if split <= INLINE_JSON and len(body) <= INLINE_BINARY:
                return parse(), started
            return await self._watched(request, asyncio.ensure_future(self._tensors.run(parse)), started), started

    async def _read_file(self, request: Request) -> tuple[Tensor, float]:
        headers = dict(request.scope["headers"])
        async with self._bodies.body(request.receive, headers) as body:
            started = time.perf_counter()
            self.batcher.check_room()

            def decode() -> Tensor:
                file = uploaded_file(body, headers.get(b"content-type", b""))
                return decode_image(file, self.model, self._settings.max_pixels)

            return await self._watched(request, asyncio.ensure_future(self._files.run(decode)), started), started

    async def _answered(
        self, request: Request, images: Tensor, started: float, version: int | None = None
    ) -> tuple[Prediction, int]:
        answer = await self._watched(request, self.batcher.submit(images, version), started)
        prediction = Prediction.of(answer.logits)
        confidence = prediction.confidence
        self._metrics.predictions(prediction.labels, confidence)
        self._history.record(time.perf_counter() - started, prediction.labels, confidence, answer.version)
        return prediction, answer.version

    async def _watched(self, request: Request, work: asyncio.Future[Result], started: float) -> Result:
        """Wait for a part of the work on a request, for all of which there is one time limit from `started` on.

        Most is done before it begins to look whether the client is still there, as looking has its cost.
        """
        seconds = self._settings.answer_seconds
        until = started + seconds
        leaving: asyncio.Task[None] | None = None
        try:
            await asyncio.wait([work], timeout=min(PATIENCE, max(until - time.perf_counter(), 0.0)))
            if not work.done():
                leaving = asyncio.ensure_future(_client_leaves(request))
                left = max(until - time.perf_counter(), 0.0)
                both: tuple[asyncio.Future[Any], ...] = (work, leaving)
                await asyncio.wait(both, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not work.done() and work.cancel():
                    late = come_again(503, f"no answer within {seconds:g} seconds: come again")
                    raise client_gone() if leaving.done() else late
            return await work
        finally:
            work.cancel()
            if leaving is not None:
                leaving.cancel()


async def _client_leaves(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _best(prediction: Prediction, model: ServedModel, version: int) -> dict[str, Any]:
    probabilities = prediction.probabilities[0].tolist()
    # By the logits, of which two may differ and have the same probability.
    numbers = np.argsort(-prediction.logits[0], kind="stable")[:TOP].tolist()
    top = [{"label": model.labels[number], "class": number, "probability": probabilities[number]} for number in numbers]
    return {
        "label": top[0]["label"],
        "class": top[0]["class"],
        "confidence": top[0]["probability"],
        "top": top,
        "model_version": str(version),
    }
