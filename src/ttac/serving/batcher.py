"""One thread that answers requests in batches, and never lets more wait than were allowed to."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ttac.serving.errors import RequestError, come_again
from ttac.serving.journal import LOGGER


@dataclass(frozen=True)
class Answer:
    """Logits `[n, K]` on the CPU, and the version of the weights that made them."""

    logits: Tensor
    version: int


class _Reply(asyncio.Future["Answer"]):
    """The future of a request, which cannot be cancelled any more when its answer is on the way."""

    def __init__(self, loop: asyncio.AbstractEventLoop, lock: threading.Condition) -> None:
        super().__init__(loop=loop)
        self._lock = lock
        self.decided = False

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it, and tell whether that was still possible."""
        with self._lock:
            return not self.decided and super().cancel(msg)


@dataclass(eq=False)
class _Request:
    images: Tensor
    future: _Reply
    version: int | None
    arrived: float = field(default_factory=time.monotonic)


Outcome = Answer | RequestError


class Batcher:
    """Answers `submit(images [n, C, H, W])` through `predict` in one thread, several requests in one pass.

    A pass begins when `max_batch` images are there, and at the latest `wait` seconds after the first of its requests
    came. At most `max_waiting` images wait; more are refused. Requests that were cancelled meanwhile are left out.
    `taken(images)` gets what was answered, after the answers are on their way. The thread starts at once: in a program
    that forks, make it afterwards.

    >>> async def ask():
    ...     batcher = Batcher(lambda images: Answer(images.flatten(1), 7), taken=lambda images: None)
    ...     answer = await batcher.submit(torch.zeros(1, 1, 1, 2))
    ...     batcher.close()
    ...     return answer.version
    >>> asyncio.run(ask())
    7
    """

    def __init__(
        self,
        predict: Callable[[Tensor], Answer],
        *,
        taken: Callable[[Tensor], None],
        max_batch: int = 64,
        wait: float = 0.001,
        max_waiting: int = 256,
    ) -> None:
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.wait = wait
        # Number of passes by their number of images, 1 to max_batch.
        self.passes = [0] * (max_batch + 1)
        self._predict = predict
        self._taken = taken
        self._queue: deque[_Request] = deque()
        self.waiting = 0  # images that were accepted and are in no pass yet
        self.closed = False  # whether it takes nothing new
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ttac-batcher", daemon=True)
        self._thread.start()

    def check_room(self, count: int = 1) -> None:
        """Refuse so many more images where there is no room for them."""
        if self.waiting + count > self.max_waiting:
            raise come_again(429, f"{self.waiting} images wait already, of at most {self.max_waiting}: come again")

    def submit(self, images: Tensor, version: int | None = None) -> asyncio.Future[Answer]:
        """Queue `images [n, C, H, W]` from within an event loop; cancel the future to take them back.

        What is not taken or not answered raises a `RequestError`; so do weights of another `version` than is given.
        """
        count = len(images)
        if count > self.max_batch:
            raise RequestError(413, f"{count} images are more than the {self.max_batch} of one request: send fewer")
        request = _Request(images, _Reply(asyncio.get_running_loop(), self._changed), version)
        with self._changed:
            if self.closed:
                raise come_again(503, "the server is shutting down")
            self.check_room(count)
            self._queue.append(request)
            self.waiting += count
            # Others in between change nothing for the thread, which sleeps until the first one's time is over.
            if len(self._queue) == 1 or self.waiting >= self.max_batch:
                self._changed.notify()
        request.future.add_done_callback(lambda future: self._withdraw(request) if future.cancelled() else None)
        return request.future

    def close(self) -> None:
        """Answer what was accepted, refuse what comes, and wait for the thread to end."""
        with self._changed:
            self.closed = True
            self._changed.notify()
        self._thread.join()

    def _withdraw(self, request: _Request) -> None:
        with self._changed:
            try:
                self._queue.remove(request)
            except ValueError:  # its pass is under way
                return
            self.waiting -= len(request.images)

    def _run(self) -> None:
        with torch.inference_mode():
            while batch := self._next_batch():
                pairs = list(zip(batch, self._outcomes(batch), strict=True))
                answered = []
                with self._changed:
                    for request, outcome in pairs:
                        # One that was cancelled during its pass leaves no trace.
                        if isinstance(outcome, Answer) and not request.future.cancelled():
                            request.future.decided = True
                            answered.append(request.images)
                _deliver(pairs)
                try:
                    if answered:
                        self._taken(answered[0] if len(answered) == 1 else torch.cat(answered))
                except Exception:  # the answers stand, and so does the thread
                    LOGGER.exception("answered images could not be handed on")

    def _next_batch(self) -> list[_Request]:
        """Wait for requests of at most `max_batch` images; none at all means that the batcher is closed and empty."""
        with self._changed:
            while not self.closed and self.waiting < self.max_batch:
                if not self._queue:
                    self._changed.wait()
                elif (left := self._queue[0].arrived + self.wait - time.monotonic()) > 0:
                    self._changed.wait(left)
                else:
                    break
            batch: list[_Request] = []
            count = 0
            while self._queue and count + len(self._queue[0].images) <= self.max_batch:
                batch.append(self._queue.popleft())
                count += len(batch[-1].images)
            self.waiting -= count
            return batch

    def _outcomes(self, batch: Sequence[_Request]) -> list[Outcome]:
        """Give each request its rows, or the error that its pass ended with."""
        count = sum(len(request.images) for request in batch)
        self.passes[count] += 1
        try:
            images = batch[0].images if len(batch) == 1 else torch.cat([request.images for request in batch])
            answer = self._predict(images)
            logits = answer.logits.detach().float().cpu()
            if len(logits) != count:
                raise RuntimeError(f"the model gave {len(logits)} rows for {count} images")
        except Exception:
            LOGGER.exception("a pass of %d images failed", count)
            return [RequestError(500, "the model failed on this batch; the log says why")] * len(batch)
        finite = bool(logits.isfinite().all())
        rows = logits.split([len(request.images) for request in batch])
        return [
            _answer(part, answer.version, finite, request.version) for request, part in zip(batch, rows, strict=True)
        ]


def _answer(logits: Tensor, version: int, finite: bool, wanted: int | None) -> Outcome:
    if wanted not in (None, version):
        return RequestError(409, f"version {version} took the place of {wanted} meanwhile: ask again")
    if finite or bool(logits.isfinite().all()):
        return Answer(logits, version)
    return RequestError(500, f"weights of version {version} gave logits that are NaN or infinite")


def _deliver(pairs: Sequence[tuple[_Request, Outcome]]) -> None:
    """Wake each event loop once."""
    for loop in {request.future.get_loop() for request, _ in pairs}:
        with contextlib.suppress(RuntimeError):  # that loop is closed, and nobody waits any more
            loop.call_soon_threadsafe(_settle, [pair for pair in pairs if pair[0].future.get_loop() is loop])


def _settle(pairs: Sequence[tuple[_Request, Outcome]]) -> None:
    for request, outcome in pairs:
        if request.future.done():
            continue
        if isinstance(outcome, Answer):
            request.future.set_result(outcome)
        else:
            request.future.set_exception(outcome)
