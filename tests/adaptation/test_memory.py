"""Images held as 8-bit levels, which nothing can tell from floats, and the bytes that an adapter takes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ttac.adaptation.memory
from ttac import checks
from ttac.adaptation.memory import SampleQueue
from ttac.methods.windows import WindowAdapter

PRECISIONS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ALL_LEVELS = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def stored_as(queue: SampleQueue) -> torch.dtype:
    images = queue.state()["images"]
    assert isinstance(images, Tensor)
    return images.dtype


def everything(queue: SampleQueue) -> Tensor:
    return queue.take(torch.arange(len(queue)))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_all_levels_come_back_bit_for_bit_in_every_precision(dtype: torch.dtype) -> None:
    images = ALL_LEVELS.to(dtype) / 255
    assert len(images.unique()) == 256
    queue = SampleQueue(4, 2)
    queue.push(images)
    assert stored_as(queue) == torch.uint8
    assert queue.take(torch.arange(4)).dtype == dtype
    assert torch.equal(bits(everything(queue)), bits(images))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_one_value_beside_the_levels_is_kept_and_so_is_all_that_came_before(dtype: torch.dtype) -> None:
    levels = ALL_LEVELS.to(dtype) / 255
    for strange in (0.001, -0.0, 1.2):
        other = levels[:1].clone()
        other[0, 0, 0, 0] = strange
        queue = SampleQueue(6, 2)
        for images in (levels[:3], other, levels[:1]):
            queue.push(images)
        assert stored_as(queue) == dtype
        assert torch.equal(bits(everything(queue)), bits(torch.cat([levels[:3], other, levels[:1]])))


def test_the_neighbours_of_every_level_are_no_levels() -> None:
    levels, multiplied = ALL_LEVELS.float() / 255, ALL_LEVELS.float() * (1 / 255)
    for direction in (-1.0, 2.0):
        neighbours = torch.nextafter(levels, torch.tensor(direction))
        for image, other in zip(neighbours.flatten(), multiplied.flatten(), strict=True):
            queue = SampleQueue(1, 2)
            queue.push(image.reshape(1, 1, 1, 1))
            assert stored_as(queue) == (torch.uint8 if image == other else torch.float32)
            assert everything(queue).item() == image.item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_levels_that_were_multiplied_by_the_reciprocal_are_levels_too(dtype: torch.dtype) -> None:
    images = ALL_LEVELS.to(dtype) * (1 / 255)
    queue, other = SampleQueue(len(images), 2), SampleQueue(len(images), 2)
    queue.push(images)
    other.load(queue.state())
    for each in (queue, other):
        assert stored_as(each) == torch.uint8
        assert torch.equal(bits(everything(each)), bits(images))


def test_a_push_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = SampleQueue(4, 2)
    queue.push(torch.zeros(2, 1, 1, 1))
    monkeypatch.setattr(SampleQueue, "_pixels", lambda self, levels: levels.no_such_memory)
    with pytest.raises(AttributeError):
        queue.push(torch.full((2, 1, 1, 1), 0.3))
    assert (len(queue), queue.fresh) == (2, 2)


def test_half_precision_images_that_were_widened_keep_their_rounding() -> None:
    images = (ALL_LEVELS.half() / 255).float()
    queue = SampleQueue(4, 2)
    queue.push(images)
    assert torch.equal(bits(everything(queue)), bits(images))


def test_layout_of_the_arrival_does_not_reach_what_is_taken_out() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 6)).float() / 255
    queue = SampleQueue(4, 2)
    queue.push(images.to(memory_format=torch.channels_last))
    assert stored_as(queue) == torch.uint8
    assert torch.equal(everything(queue), images)
    assert everything(queue).is_contiguous()


class LargestFloat(TorchDispatchMode):
    """Notes the largest floating point tensor that is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.is_floating_point():
            self.largest = max(self.largest, made.numel())
        return made


def test_only_the_images_asked_for_become_floats() -> None:
    queue = SampleQueue(100, 2)
    queue.push(torch.zeros(100, 3, 8, 8))
    with LargestFloat() as noted:
        queue.take(torch.arange(7))
    assert noted.largest == 7 * 3 * 8 * 8


@pytest.mark.parametrize("eight_bit", [True, False])
def test_state_goes_on_in_the_same_storage(eight_bit: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    pushes = [torch.randint(0, 256, (3, 1, 2, 2), generator=generator).float() / 255 for _ in range(4)]
    if not eight_bit:
        pushes[0][0] = 0.3
    queue, other = SampleQueue(7, 3), SampleQueue(7, 3)
    for images in pushes[:3]:
        queue.push(images)
    other.load(queue.state())
    for each in (queue, other):
        each.push(pushes[3])
        assert stored_as(each) == (torch.uint8 if eight_bit else torch.float32)
    assert torch.equal(everything(queue), everything(other))
    assert sorted(everything(queue).flatten().tolist()) == sorted(torch.cat(pushes)[-7:].flatten().tolist())


def test_state_with_floats_and_no_more_is_taken_as_it_is() -> None:
    images = ALL_LEVELS.float() / 255
    queue = SampleQueue(4, 2)
    queue.push(images)
    state = {name: value for name, value in queue.state().items() if name != "like"} | {"images": images.clone()}
    other = SampleQueue(4, 2)
    other.load(state)
    assert torch.equal(everything(other), images)
    assert stored_as(other) == torch.float32
    with pytest.raises(KeyError):
        other.load({**state, "images": ALL_LEVELS})  # levels of nobody knows what


@pytest.mark.parametrize("method", ["ttac++", "shot", "t3a", "adacontrast"])
def test_predictions_and_saved_states_are_those_of_floats(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject(method)
    batches = ((255 * subject.images).round() / 255).split(7)

    def run(resumed_after: int | None = None) -> tuple[Tensor, WindowAdapter]:
        adapter, logits = subject.make(), []
        for number, images in enumerate(batches):
            if number == resumed_after:
                file = io.BytesIO()
                torch.save(adapter.state_dict(), file)
                file.seek(0)
                adapter = subject.make()
                adapter.load_state_dict(torch.load(file, weights_only=True))
            logits.append(adapter(images))
        assert isinstance(adapter, WindowAdapter)
        return torch.cat(logits), adapter

    levels, adapter = run()
    resumed, _ = run(resumed_after=4)
    monkeypatch.setattr(ttac.adaptation.memory, "levels_of", lambda images, **_: None)
    floats, reference = run()
    assert (stored_as(adapter.queue), stored_as(reference.queue)) == (torch.uint8, torch.float32)
    assert torch.equal(levels, floats)
    assert torch.equal(levels, resumed)


def test_what_an_adapter_takes_by_hand() -> None:
    subject = checks.subject("ttac", queue=32)
    adapter = subject.make()
    assert isinstance(adapter, WindowAdapter)
    eight_bit = (255 * subject.images).round() / 255
    for images in eight_bit.split(8):
        adapter(images)
    parts = adapter.memory_parts()
    weights = sum(value.numel() * value.element_size() for value in adapter.classifier.state_dict().values())
    assert parts["source"] == weights
    assert parts["classifier"] == weights + 2 * 4  # mean and std of the pixels
    assert parts["updater"] == 4 * sum(value.numel() for value in adapter.classifier.backbone_parameters().values())
    pixels, classes, width = 3 * 16 * 16, 4, 16
    assert parts["queue"] == 32 * (pixels + 4 * classes + 4 * 8)
    assert adapter.queue.limit == 32 * (4 * pixels + 4 * classes + 4 * 8)
    gaussians = (classes + 1) * (width * width + width) * 4
    assert parts["stats"] == gaussians
    assert parts["alignments"] >= 2 * gaussians  # anchors and running ones, and what is cached of the first
    assert adapter.memory_bytes() == sum(parts.values())
    before = adapter.memory_bytes() - parts["queue"]
    adapter(subject.images[:8])  # not 8-bit
    assert adapter.memory_parts()["queue"] == adapter.queue.limit == adapter.memory_bytes() - before


def test_counting_makes_nothing() -> None:
    subject = checks.subject("ttac++")
    adapter = subject.make()
    adapter(subject.images)
    with LargestFloat() as noted:
        adapter.memory_parts()
    assert noted.largest == 0


def test_a_state_of_before_an_option_was_there_has_its_default() -> None:
    subject = checks.subject("ttac")
    adapter = subject.make()
    adapter(subject.images)
    state = adapter.state_dict()
    del state["options"]["walk"], state["method_state"]["queue"]["walked"]
    other = subject.make()
    other.load_state_dict(state)
    assert torch.equal(other.predict(subject.images), adapter.predict(subject.images))
    for wrong in ({**state["options"], "walk": checks.WINDOW}, None, "none"):
        with pytest.raises(ValueError, match="the state is of another options"):
            other.load_state_dict({**state, "options": wrong})
