"""One thread that answers requests in batches, and never lets more wait than were allowed to."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Answer:
    """Logits `[n, K]` on the CPU, and the version of the weights that made them."""

    logits: Tensor
    version: int


class BusyError(RuntimeError):
    """As many images wait as may; the same request may be accepted in a moment."""


class ClosedError(RuntimeError):
    """The batcher is shutting down and takes nothing new."""


class TooManyImagesError(ValueError):
    """A request has more images than one pass takes, so that one version could not answer all of them."""


class NotFiniteError(RuntimeError):
    """The model's logits are NaN or infinite."""


class OtherVersionError(RuntimeError):
    """A request asked for a version of the weights, and its pass was made by another one."""


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
    loop: asyncio.AbstractEventLoop
    version: int | None
    arrived: float = field(default_factory=time.monotonic)


Outcome = Answer | Exception


class Batcher:
    """Answers `submit(images [n, C, H, W])` through `predict` in one thread, several requests in one pass.

    A pass begins when `max_batch` images are there, and at the latest `wait` seconds after the first of its requests
    came. At most `max_waiting` images wait; more are refused with `BusyError`. Requests that were cancelled meanwhile
    are left out. `taken(images)` gets what was answered, after the answers are on their way. The thread starts at
    once: in a program that forks, make it afterwards.

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
        if max_batch < 1 or max_waiting < max_batch:
            raise ValueError(f"1 <= max_batch <= max_waiting is needed, not {max_batch} and {max_waiting}")
        if not 0 <= wait < float("inf"):
            raise ValueError(f"wait must be seconds from 0 on, not {wait}")
        self.max_batch = max_batch
        self.max_waiting = max_waiting
        self.wait = wait
        # Number of passes by their number of images, 1 to max_batch.
        self.passes = [0] * (max_batch + 1)
        self._predict = predict
        self._taken = taken
        self._queue: deque[_Request] = deque()
        self._waiting = 0
        self._computing = False
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ttac-batcher", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        """Number of images that were accepted and are in no pass yet."""
        return self._waiting

    @property
    def busy(self) -> bool:
        """Whether a pass is under way or images wait for one."""
        return self._computing or self._waiting > 0

    @property
    def full(self) -> bool:
        """Whether not a single image more would be accepted."""
        return self._waiting >= self.max_waiting

    @property
    def closed(self) -> bool:
        """Whether it takes nothing new."""
        return self._closed

    def submit(self, images: Tensor, version: int | None = None) -> asyncio.Future[Answer]:
        """Queue `images [n, C, H, W]` from within an event loop; cancel the future to take them back.

        Where a `version` is given, only weights of it answer: others make an `OtherVersionError` of it.
        """
        count = len(images)
        if count > self.max_batch:
            raise TooManyImagesError(f"{count} images are more than the {self.max_batch} of one request: send fewer")
        loop = asyncio.get_running_loop()
        request = _Request(images, _Reply(loop, self._changed), loop, version)
        with self._changed:
            if self._closed:
                raise ClosedError("the server is shutting down")
            if self._waiting + count > self.max_waiting:
                raise BusyError(f"{self._waiting} images wait already, of at most {self.max_waiting}: come again")
            self._queue.append(request)
            self._waiting += count
            # Others in between change nothing for the thread, which sleeps until the first one's time is over.
            if len(self._queue) == 1 or self._waiting >= self.max_batch:
                self._changed.notify()
        request.future.add_done_callback(lambda future: self._withdraw(request) if future.cancelled() else None)
        return request.future

    def close(self) -> None:
        """Answer what was accepted, refuse what comes, and wait for the thread to end."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _withdraw(self, request: _Request) -> None:
        with self._changed:
            try:
                self._queue.remove(request)
            except ValueError:  # its pass is under way
                return
            self._waiting -= len(request.images)

    def _run(self) -> None:
        with torch.inference_mode():
            while batch := self._next_batch():
                outcomes = self._outcomes(batch)
                self._computing = False
                answered = self._decided(batch, outcomes)
                _deliver(batch, outcomes)
                if answered:
                    self._hand_over(answered)

    def _decided(self, batch: Sequence[_Request], outcomes: Sequence[Outcome]) -> list[Tensor]:
        """Give the images that are answered; a request that was cancelled during its pass leaves no trace."""
        answered = []
        with self._changed:
            for request, outcome in zip(batch, outcomes, strict=True):
                if isinstance(outcome, Answer) and not request.future.cancelled():
                    request.future.decided = True
                    answered.append(request.images)
        return answered

    def _next_batch(self) -> list[_Request]:
        """Wait for requests of at most `max_batch` images; none at all means that the batcher is closed and empty."""
        with self._changed:
            while not self._closed and self._waiting < self.max_batch:
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
            self._waiting -= count
            self._computing = bool(batch)
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
        except Exception as error:
            logger.exception("a pass of %d images failed", count)
            return [error] * len(batch)
        finite = bool(logits.isfinite().all())
        rows = logits.split([len(request.images) for request in batch])
        return [
            _answer(part, answer.version, finite, request.version) for request, part in zip(batch, rows, strict=True)
        ]

    def _hand_over(self, answered: list[Tensor]) -> None:
        try:
            self._taken(answered[0] if len(answered) == 1 else torch.cat(answered))
        except Exception:  # the answers stand, and so does the thread
            logger.exception("answered images could not be handed on")


def _answer(logits: Tensor, version: int, finite: bool, wanted: int | None) -> Outcome:
    if wanted not in (None, version):
        return OtherVersionError(f"version {version} took the place of {wanted} meanwhile: ask again")
    if finite or bool(logits.isfinite().all()):
        return Answer(logits, version)
    return NotFiniteError(f"weights of version {version} gave logits that are NaN or infinite")


def _deliver(batch: Sequence[_Request], outcomes: Sequence[Outcome]) -> None:
    """Wake each event loop once."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[asyncio.Future[Answer], Outcome]]] = {}
    for request, outcome in zip(batch, outcomes, strict=True):
        by_loop.setdefault(request.loop, []).append((request.future, outcome))
    for loop, pairs in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, pairs)
        except RuntimeError:  # that loop is closed, and nobody waits any more
            logger.warning("%d requests went away with their event loop", len(pairs))


def _settle(pairs: Sequence[tuple[asyncio.Future[Answer], Outcome]]) -> None:
    for future, outcome in pairs:
        if future.done():
            continue
        if isinstance(outcome, Answer):
            future.set_result(outcome)
        else:
            future.set_exception(outcome)
