"""Batches of requests: order, limits, time, errors and the end; and the history that they leave."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import PATIENCE

from ttac.serving.batcher import Answer, Batcher
from ttac.serving.errors import RequestError
from ttac.serving.history import History

Result = TypeVar("Result")


class Model:
    """Gives each image's first pixel back; a pass waits while `gate` is closed, and each has its own version."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Semaphore(0)
        self.passes: list[int] = []
        self.taken: list[Tensor] = []

    def __call__(self, images: Tensor) -> Answer:
        assert torch.is_inference_mode_enabled()
        self.passes.append(len(images))
        self.entered.release()
        assert self.gate.wait(PATIENCE)
        first = images[:, 0, 0, 0]
        if bool((first == -1).any()):
            raise RuntimeError("this image breaks the model")
        return Answer(torch.stack([first, first.log()], 1), len(self.passes))

    def in_pass(self) -> None:
        """Wait until a pass is under way."""
        assert self.entered.acquire(timeout=PATIENCE)

    def seen(self) -> list[float]:
        return torch.cat(self.taken)[:, 0, 0, 0].tolist() if self.taken else []


def images(*values: float) -> Tensor:
    return torch.tensor(values).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2).clone()


@contextmanager
def refused(status: int) -> Iterator[None]:
    with pytest.raises(RequestError) as caught:
        yield
    assert caught.value.status_code == status


def run(body: Callable[[Batcher, Model], Awaitable[Result]], **options: Any) -> tuple[Result, Model]:
    """Run a test against a batcher, and close it."""
    model = Model()
    batcher = Batcher(model, taken=model.taken.append, **{"wait": 0.0, **options})

    async def main() -> Result:
        try:
            return await asyncio.wait_for(body(batcher, model), PATIENCE)
        finally:
            model.gate.set()
            await asyncio.to_thread(batcher.close)

    return asyncio.run(main()), model


def test_each_request_gets_its_own_rows_from_one_version() -> None:
    async def body(batcher: Batcher, model: Model) -> list[Answer]:
        model.gate.clear()
        first = batcher.submit(images(1))
        await asyncio.to_thread(model.in_pass)
        rest = [batcher.submit(images(*range(2 + 3 * k, 5 + 3 * k))) for k in range(3)]
        assert batcher.waiting == 9
        model.gate.set()
        return list(await asyncio.gather(first, *rest))

    answers, model = run(body, max_batch=8)
    assert [answer.logits[:, 0].tolist() for answer in answers] == [[1], [2, 3, 4], [5, 6, 7], [8, 9, 10]]
    # Nine images do not go into a pass of eight, and no request is torn apart.
    assert model.passes == [1, 6, 3]
    assert [answer.version for answer in answers] == [1, 2, 2, 3]
    assert model.seen() == list(range(1, 11))


NEVER = 10 * PATIENCE  # seconds: a pass that waits for them fails by the time limit of `run`


class StandingClock:
    """A clock for the batcher's waiting that goes on when it is told to, as no machine promises to be quick."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = time.monotonic()
        monkeypatch.setattr("ttac.serving.batcher.time", SimpleNamespace(monotonic=lambda: self.now))

    def go_on(self) -> None:
        """Let all waiting be over, that of the next requests too."""
        self.now = time.monotonic() + NEVER


def test_a_request_waits_for_company_and_no_longer_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandingClock(monkeypatch)

    async def body(batcher: Batcher, model: Model) -> None:
        first = batcher.submit(images(1))
        await asyncio.sleep(0.1)  # in which the thread looks at the clock again
        second = batcher.submit(images(2))
        await asyncio.sleep(0.1)
        assert (batcher.waiting, model.passes) == (2, [])
        clock.go_on()
        await asyncio.gather(first, second)

    assert run(body, wait=0.05)[1].passes == [2]


def test_a_full_batch_does_not_wait() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        half = batcher.submit(images(1, 2))
        await asyncio.sleep(0.05)  # in which the thread begins to wait for more
        await asyncio.gather(half, batcher.submit(images(3, 4)))

    assert run(body, wait=NEVER, max_batch=4)[1].passes == [4]


def test_images_are_counted_and_not_requests() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        model.gate.clear()
        first = batcher.submit(images(1))
        await asyncio.to_thread(model.in_pass)
        accepted = [batcher.submit(images(2, 3, 4)), batcher.submit(images(5, 6))]
        with refused(429):
            batcher.submit(images(7, 8))
        accepted.append(batcher.submit(images(9)))
        with refused(429):
            batcher.submit(images(10))
        with refused(429):
            batcher.check_room()
        model.gate.set()
        await asyncio.gather(first, *accepted)
        batcher.check_room()
        assert batcher.waiting == 0

    _, model = run(body, max_batch=4, max_waiting=6)
    assert sorted(model.seen()) == [1, 2, 3, 4, 5, 6, 9]


def test_a_request_larger_than_a_pass_is_refused() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        with refused(413):
            batcher.submit(images(*range(5)))

    assert run(body, max_batch=4)[1].passes == []


def test_a_cancelled_request_is_not_computed_and_makes_room() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        model.gate.clear()
        first = batcher.submit(images(1))
        await asyncio.to_thread(model.in_pass)
        gone, stays = batcher.submit(images(2, 3)), batcher.submit(images(4))
        gone.cancel()
        first.cancel()  # its pass is under way, and is not answered any more
        await asyncio.sleep(0)
        assert batcher.waiting == 1
        model.gate.set()
        assert (await stays).logits[:, 0].tolist() == [4]

    _, model = run(body)
    assert model.passes == [1, 1]
    assert model.seen() == [4]


def test_a_cancelled_request_that_was_alone_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = StandingClock(monkeypatch)

    async def body(batcher: Batcher, model: Model) -> None:
        batcher.submit(images(1)).cancel()
        await asyncio.sleep(0)  # for what was cancelled to be withdrawn
        clock.go_on()
        await asyncio.sleep(0.1)  # in which the thread looks for what it waited for
        assert (batcher.waiting, model.passes) == (0, [])
        await batcher.submit(images(2))

    assert run(body, wait=0.05)[1].seen() == [2]


def test_what_was_handed_on_is_answered_even_if_it_is_cancelled_meanwhile() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        future = batcher.submit(images(1))
        until = time.monotonic() + PATIENCE
        while not model.taken and time.monotonic() < until:
            time.sleep(0.01)  # holds the event loop up, so that the answer is under way
        assert not future.done()
        assert not future.cancel()
        assert (await future).logits[:, 0].tolist() == [1]

    assert run(body)[1].seen() == [1]


def test_a_version_that_was_asked_for_answers_alone() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        assert (await batcher.submit(images(1), 1)).version == 1
        with refused(409):
            await batcher.submit(images(2), 1)

    assert run(body)[1].seen() == [1]


def test_an_error_reaches_only_its_pass_and_the_thread_lives_on() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        with refused(500):
            await batcher.submit(images(-1))
        await batcher.submit(images(2))

    assert run(body)[1].seen() == [2]


def test_images_that_do_not_fit_together_end_their_pass_alone() -> None:
    async def body(batcher: Batcher, _: Model) -> None:
        together = [batcher.submit(images(1)), batcher.submit(torch.zeros(1, 2, 1, 1))]
        for error in await asyncio.gather(*together, return_exceptions=True):
            assert isinstance(error, RequestError)
        batcher.wait = 0.0
        assert (await batcher.submit(images(3))).version

    run(body, max_batch=2, wait=NEVER)


def test_logits_that_are_not_finite_reach_only_their_request() -> None:
    async def body(batcher: Batcher, model: Model) -> list[Any]:
        requests = [batcher.submit(images(1)), batcher.submit(images(0, 1)), batcher.submit(images(2))]
        return list(await asyncio.gather(*requests, return_exceptions=True))

    answers, model = run(body, max_batch=4, wait=NEVER)
    assert model.passes == [4]
    assert [type(answer) for answer in answers] == [Answer, RequestError, Answer]
    assert model.seen() == [1, 2]


def test_an_error_of_whoever_takes_the_images_changes_no_answer() -> None:
    def taken(_: Tensor) -> None:
        raise OSError("the ring is gone")

    batcher = Batcher(Model(), taken=taken, wait=0.0)

    async def main() -> None:
        assert (await batcher.submit(images(1))).version == 1
        assert (await batcher.submit(images(1))).version == 2

    asyncio.run(main())
    batcher.close()


def test_closing_answers_what_was_accepted_and_refuses_the_rest() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        model.gate.clear()
        accepted = [batcher.submit(images(k)) for k in range(1, 6)]
        await asyncio.to_thread(model.in_pass)
        closing = asyncio.ensure_future(asyncio.to_thread(batcher.close))
        while not batcher.closed:
            await asyncio.sleep(0.01)
        with refused(503):
            batcher.submit(images(9))
        model.gate.set()
        answers = await asyncio.gather(*accepted)
        assert [answer.logits[0, 0].item() for answer in answers] == [1, 2, 3, 4, 5]
        await closing

    assert run(body, max_batch=2, wait=NEVER)[1].seen() == [1, 2, 3, 4, 5]


def test_an_event_loop_that_is_gone_harms_nobody() -> None:
    model = Model()
    batcher = Batcher(model, taken=model.taken.append, wait=0.0)
    model.gate.clear()

    async def leave() -> None:
        batcher.submit(images(1))

    async def ask() -> Answer:
        return await batcher.submit(images(2))

    asyncio.run(leave())
    model.gate.set()
    assert asyncio.run(ask()).logits[0, 0] == 2
    batcher.close()


def test_many_threads_of_requests_get_what_they_asked_for() -> None:
    async def body(batcher: Batcher, model: Model) -> None:
        async def ask(value: int) -> None:
            while True:
                try:
                    answer = await batcher.submit(images(*range(value, value + 1 + value % 3)))
                except RequestError:
                    await asyncio.sleep(0.001)
                    continue
                assert answer.logits[:, 0].tolist() == list(range(value, value + 1 + value % 3))
                return

        await asyncio.gather(*(ask(value) for value in range(1, 400)))

    _, model = run(body, max_batch=8, max_waiting=32)
    assert len(model.seen()) == sum(1 + value % 3 for value in range(1, 400)) == sum(model.passes)
    assert max(model.passes) <= 8


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_the_history_has_a_row_a_second_also_of_those_in_which_nothing_happened() -> None:
    clock = Clock()
    history = History(["ant", "bee"], clock=clock)
    history.note(3, None)
    for milliseconds in range(1, 101):
        history.record(milliseconds / 1e3, np.array([0, 1, 1]), 1.5, version=3)
    history.refuse()
    clock.now += 1.2
    history.note(4, 0.25)
    clock.now += 2
    earliest = time.time()
    found = history.json()
    latest = time.time()
    assert found["requests"] == [100, 0, 0]
    assert found["images"] == [300, 0, 0]
    assert found["refused"] == [1, 0, 0]
    assert found["version"] == [3, 4, 4]
    assert found["distance"] == [None, 0.25, 0.25]
    assert found["confidence"] == [0.5, None, None]
    assert found["p50_ms"] == [pytest.approx(50.5), None, None]
    assert found["p99_ms"] == [pytest.approx(99.01), None, None]
    assert found["classes"] == {"names": ["ant", "bee"], "counts": [[100, 200], [0, 0], [0, 0]]}
    assert np.diff(found["times"]).tolist() == pytest.approx([1, 1])
    assert earliest - 2 < found["times"][-1] < latest  # the last whole second began one to two seconds ago
    summary = history.summary()
    assert (summary["requests"], summary["per_second"]) == (100, 100.0)
    json.dumps(found, allow_nan=False)


def test_the_history_forgets_what_is_old_and_keeps_its_totals() -> None:
    clock = Clock()
    history = History(["ant"], points=5, clock=clock)
    for second in range(12):
        history.record(0.001, np.zeros(second, np.int64), 0.0, version=second)
        clock.now += 1
    assert history.json()["images"] == [7, 8, 9, 10, 11]
    assert history.summary()["images"] == sum(range(12))
    clock.now += 1e6
    assert history.json()["images"] == [0] * 5
    assert history.json()["version"] == [11] * 5


def test_rare_classes_are_folded() -> None:
    clock = Clock()
    history = History([str(number) for number in range(20)], clock=clock)
    counts = np.random.default_rng(0).permutation(20) + 1
    history.record(0.001, np.repeat(np.arange(20), counts), 0.0, version=1)
    clock.now += 1
    classes = history.json()["classes"]
    frequent = [number for number in range(20) if counts[number] > 8]
    assert classes["names"] == [str(number) for number in frequent] + ["others"]
    assert classes["counts"] == [[*counts[frequent].tolist(), sum(range(1, 9))]]


def test_the_history_is_whole_while_another_thread_writes_it() -> None:
    clock = Clock()
    history = History(["ant", "bee"], points=20, clock=clock)
    stopping = threading.Event()

    def write() -> None:
        while not stopping.is_set():
            history.record(0.001, np.array([0, 1, 1]), 1.5, version=1)
            clock.now += 0.01

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(200):
            found = history.json()
            lengths = {len(value) for value in found.values() if isinstance(value, list)}
            assert lengths == {len(found["classes"]["counts"])}
            assert [sum(row) for row in found["classes"]["counts"]] == found["images"]
            assert found["images"] == [3 * requests for requests in found["requests"]]
    finally:
        stopping.set()
        thread.join()
