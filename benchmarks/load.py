"""Load for a server of models: requests of one image each over several connections, and what became of each."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ttac.serving.client import InferenceClient, RefusedError

Outcome = Literal["answered", "refused", "lost", "failed"]  # refused: 429 or 503; lost: with its connection
REST = 0.02  # seconds of a connection after its request was lost, while its server starts again


@dataclass(frozen=True)
class Sent:
    """A request: when it was due, was sent and was over (`time.time()`), and how it ended."""

    due: float
    began: float
    done: float
    image: int
    outcome: Outcome
    reason: str = ""
    version: int = 0
    logits: NDArray[np.float32] | None = None  # [K], where they were asked for

    @property
    def milliseconds(self) -> float:
        """From when it was due, so that the wait for a connection counts: a busy server is not asked less often."""
        return 1000 * (self.done - self.due)

    def overlaps(self, spans: Sequence[tuple[float, float]]) -> bool:
        """Tell whether any of these spans of time was under way while the server had the request."""
        return any(start < self.done and self.began < end for start, end in spans)


def at_once(going_on: Callable[[], bool]) -> Iterator[float]:
    """Closed loop: each connection sends its next request when it has the answer to the last one."""
    while going_on():
        yield time.time()


def at_random(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Open loop: requests come at `rate` a second, independently of each other and of the answers (Poisson)."""
    random, due = np.random.default_rng(seed), time.time()
    until = due + seconds
    while (due := due + random.exponential(1 / rate)) < until:
        yield due


def for_seconds(seconds: float) -> Callable[[], bool]:
    """Make a condition that holds for a while from now on."""
    until = time.monotonic() + seconds
    return lambda: time.monotonic() < until


def drive(
    connect: Callable[[], InferenceClient],
    model: str,
    images: NDArray[np.uint8],
    schedule: Callable[[], Iterator[float]],
    *,
    connections: int,
    logits: bool = False,
) -> list[Sent]:
    """Send requests as they are due, each over the first connection that is free; `schedule` starts with the load."""
    outputs = ("labels", "logits") if logits else ("labels",)
    found: list[Sent] = []
    times: list[Iterator[float]] = []
    begin = threading.Barrier(connections, action=lambda: times.append(schedule()))
    turn = threading.Lock()
    numbers = iter(range(2**62))

    def work() -> None:
        with connect() as client:
            client.ready()  # opens the connection
            begin.wait()
            while True:
                with turn:
                    due, number = next(times[0], None), next(numbers)
                if due is None:
                    return
                time.sleep(max(0.0, due - time.time()))
                sent = _ask(client, model, images, number % len(images), due, outputs)
                found.append(sent)
                if sent.outcome == "lost":
                    time.sleep(REST)

    workers = [threading.Thread(target=work) for _ in range(connections)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return found


def _ask(
    client: InferenceClient, model: str, images: NDArray[np.uint8], image: int, due: float, outputs: Sequence[str]
) -> Sent:
    began = time.time()

    def ended(outcome: Outcome, **more: Any) -> Sent:
        return Sent(due, began, time.time(), image, outcome, **more)

    try:
        answer = client.infer(model, images[image : image + 1], outputs)
    except RefusedError as error:
        return ended("refused", reason=str(error))
    except ConnectionError as error:
        return ended("lost", reason=str(error))
    except ValueError as error:
        return ended("failed", reason=str(error))
    logits = answer.outputs["logits"][0] if "logits" in outputs else None
    return ended("answered", version=int(answer.version), logits=logits)
