"""What is said before a run is what happens."""

from __future__ import annotations

import pytest
import torch

from ttac import checks
from ttac.adaptation.adapter import Adapter
from ttac.evaluation.forecast import Pace, count_updates, foretell, nothing_learned


def updates(adapter: Adapter, images: torch.Tensor, batch: int) -> int:
    count, parts = 0, images.split(batch)
    for number, part in enumerate(parts):
        adapter(part, last=number == len(parts) - 1)
        count += len(adapter.last_step.update_seconds)
    return count


@pytest.mark.parametrize("reset_every", [0, 8, 11])
@pytest.mark.parametrize("images", [1, 2, 7, 8, 9, 10, 11, 12, 16, 21, 22, 23, 24, 33, 44])
def test_updates_are_as_many_as_counted(images: int, reset_every: int) -> None:
    subject = checks.subject("bn", reset_every=reset_every)
    expected = count_updates(images, checks.WINDOW, reset_every)
    assert updates(subject.make(), subject.images[:images], batch=5) == expected


def test_a_forecast_leaves_the_adapter_as_it_was() -> None:
    subject = checks.subject("ttac++")
    adapter, fresh = subject.make(), subject.make()
    few = [(subject.images[:8], None)]
    assert foretell(44, adapter, few, beside=True).startswith("44 images, 6 updates of 8, about ")
    assert torch.equal(adapter(subject.images[:16]), fresh(subject.images[:16]))


@pytest.mark.parametrize("few", [[], [(torch.rand(1, 3, 16, 16), None)]])
def test_without_images_to_try_no_time_is_told(few: list[tuple[torch.Tensor, None]]) -> None:
    assert foretell(44, checks.subject("tent").make(), few, beside=False) == "44 images, 6 updates of 8"


def test_a_stream_of_one_window_is_not_tried_before() -> None:
    def never() -> object:
        raise AssertionError("images were read")
        yield

    assert foretell(8, checks.subject("tent").make(), never(), beside=True) == "8 images, 1 update of 8"  # type: ignore[arg-type]


def test_the_time_of_a_stream_is_that_of_its_passes() -> None:
    adapter = checks.subject("tent", queue=16, passes=2).make()  # windows of 8
    pace = Pace(read=1.0, predict=10.0, minibatch=100.0, learn=1000.0)
    walked = 2 * (8 + 16 + 16 + 16)
    minibatches = 2 * (1 + 2 + 2 + 2)
    assert pace.of_stream(27, adapter, beside=False) == 27 * 11 + 100 * minibatches + 1000 * walked
    assert pace.of_stream(27, adapter, beside=True) == 27 * 41 + 100 * minibatches + 1000 * walked


def test_steps_that_were_all_refused_are_told() -> None:
    subject = checks.subject("tent")
    adapter = subject.make()
    take = adapter.steps.take
    vars(adapter.steps)["take"] = lambda losses, sound=None: take(losses, torch.tensor(False))
    assert nothing_learned(adapter, updates(adapter, subject.images, 8)) is not None
    well = subject.make()
    assert nothing_learned(well, updates(well, subject.images, 8)) is None
    assert nothing_learned(checks.subject("test").make(), 0) is None
