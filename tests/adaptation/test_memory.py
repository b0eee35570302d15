"""Images held as 8-bit levels, which nothing can tell from floats, and the bytes that an adapter takes."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import ttac.model.inputs
from ttac import checks
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.memory import SampleQueue
from ttac.common.state import cloned
from ttac.model.inputs import ImageInput, ImageStorage

PRECISIONS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
ALL_LEVELS = torch.arange(256, dtype=torch.uint8).reshape(4, 1, 8, 8)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


def stored_as(queue: SampleQueue) -> torch.dtype:
    images = queue.samples.images
    assert images is not None
    return images.dtype


def queue_of(capacity: int) -> SampleQueue:
    return SampleQueue(capacity, ImageInput(None, None, None))


def everything(queue: SampleQueue) -> Tensor:
    return queue.take(torch.arange(len(queue)))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_all_levels_come_back_bit_for_bit_in_every_precision(dtype: torch.dtype) -> None:
    images = ALL_LEVELS.to(dtype) / 255
    assert len(images.unique()) == 256
    queue = queue_of(4)
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
        queue = queue_of(6)
        for images in (levels[:3], other, levels[:1]):
            queue.push(images)
        assert stored_as(queue) == dtype
        assert torch.equal(bits(everything(queue)), bits(torch.cat([levels[:3], other, levels[:1]])))


def test_the_neighbours_of_every_level_are_no_levels() -> None:
    levels, multiplied = ALL_LEVELS.float() / 255, ALL_LEVELS.float() * (1 / 255)
    for direction in (-1.0, 2.0):
        neighbours = torch.nextafter(levels, torch.tensor(direction))
        for image, other in zip(neighbours.flatten(), multiplied.flatten(), strict=True):
            queue = queue_of(1)
            queue.push(image.reshape(1, 1, 1, 1))
            assert stored_as(queue) == (torch.uint8 if image == other else torch.float32)
            assert everything(queue).item() == image.item()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_levels_that_were_multiplied_by_the_reciprocal_are_levels_too(dtype: torch.dtype) -> None:
    images = ALL_LEVELS.to(dtype) * (1 / 255)
    queue, other = queue_of(len(images)), queue_of(len(images))
    queue.push(images)
    other.load_state(cloned(queue.state()))
    for each in (queue, other):
        assert stored_as(each) == torch.uint8
        assert torch.equal(bits(everything(each)), bits(images))


def test_a_push_that_fails_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_of(4)
    queue.push(torch.zeros(2, 1, 1, 1))
    monkeypatch.setattr(ImageStorage, "_pixels", lambda self, levels: levels.no_such_memory)
    with pytest.raises(AttributeError):
        queue.push(torch.full((2, 1, 1, 1), 0.3))
    assert (len(queue), queue.fresh) == (2, 2)


def test_half_precision_images_that_were_widened_keep_their_rounding() -> None:
    images = (ALL_LEVELS.half() / 255).float()
    queue = queue_of(4)
    queue.push(images)
    assert torch.equal(bits(everything(queue)), bits(images))


def test_layout_of_the_arrival_does_not_reach_what_is_taken_out() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 6)).float() / 255
    queue = queue_of(4)
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
    queue = queue_of(100)
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
    queue, other = queue_of(7), queue_of(7)
    for images in pushes[:3]:
        queue.push(images)
    other.load_state(cloned(queue.state()))
    for each in (queue, other):
        each.push(pushes[3])
        assert stored_as(each) == (torch.uint8 if eight_bit else torch.float32)
    assert torch.equal(everything(queue), everything(other))
    assert sorted(everything(queue).flatten().tolist()) == sorted(torch.cat(pushes)[-7:].flatten().tolist())


@pytest.mark.parametrize("method", ["ttac++", "shot", "t3a", "adacontrast"])
def test_predictions_and_saved_states_are_those_of_floats(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject(method)
    batches = ((255 * subject.images).round() / 255).split(7)

    def run(resumed_after: int | None = None) -> tuple[Tensor, Adapter]:
        adapter, logits = subject.make(), []
        for number, images in enumerate(batches):
            if number == resumed_after:
                file = io.BytesIO()
                torch.save(adapter.state_dict(), file)
                file.seek(0)
                adapter = subject.make()
                adapter.load_state_dict(torch.load(file, weights_only=True))
            logits.append(adapter(images))
        assert isinstance(adapter, Adapter)
        return torch.cat(logits), adapter

    levels, adapter = run()
    resumed, _ = run(resumed_after=4)
    monkeypatch.setattr(ttac.model.inputs, "levels_of", lambda images, **_: None)
    floats, reference = run()
    assert (stored_as(adapter.memory_in_use), stored_as(reference.memory_in_use)) == (torch.uint8, torch.float32)
    assert torch.equal(levels, floats)
    assert torch.equal(levels, resumed)


def test_what_an_adapter_takes_by_hand() -> None:
    subject = checks.subject("ttac", queue=32, momentum=0.9)
    adapter = subject.make()
    assert isinstance(adapter, Adapter)
    eight_bit = (255 * subject.images).round() / 255
    for images in eight_bit.split(8):
        adapter(images)
    parts = adapter.memory_parts()
    weights = sum(value.numel() * value.element_size() for value in adapter.classifier.state_dict().values())
    assert parts["source"] == weights
    assert parts["classifier"] == weights + 2 * 4  # mean and std of the pixels
    assert parts["steps"] == 4 * sum(value.numel() for value in adapter.classifier.backbone_parameters().values())
    pixels, classes, width = 3 * 16 * 16, 4, 16
    assert parts["memory"] == 32 * (pixels + 4 * classes + 4 * 8) + 4 * classes + 2 * 8  # and a blank row
    assert adapter.memory_in_use.samples.limit == 32 * 4 * pixels
    gaussians = (classes + 1) * (width * width + width) * 4
    depths = sum((channels * channels + channels) * 4 for channels in (4, 8, 16))  # of the outputs of blocks
    assert parts["knowledge"] == gaussians + depths
    assert parts["method"] >= 2 * gaussians  # anchors and running ones, and what is cached of the first
    assert adapter.memory_bytes() == sum(parts.values())
    adapter(subject.images[:8])  # not 8-bit
    assert adapter.memory_parts()["memory"] == parts["memory"] + 32 * 3 * pixels


def test_counting_makes_nothing() -> None:
    subject = checks.subject("ttac++")
    adapter = subject.make()
    adapter(subject.images)
    with LargestFloat() as noted:
        adapter.memory_parts()
    assert noted.largest == 0


def test_a_state_of_another_format_or_other_options_is_refused_and_changes_nothing() -> None:
    subject = checks.subject("ttac")
    adapter, other = subject.make(), subject.make()
    adapter(subject.images)
    state, before = adapter.state_dict(), other.state_dict()
    older = {name: value for name, value in state.items() if name != "format"}  # the version before had none
    with pytest.raises(ValueError, match="start the stream again, or go on with the version that saved it"):
        other.load_state_dict(older)
    for wrong in ({**state["options"], "walk": checks.WINDOW}, None, "none"):
        with pytest.raises(ValueError, match="the state is of another options"):
            other.load_state_dict({**state, "options": wrong})
    with pytest.raises(ValueError, match="damaged"):
        other.load_state_dict({**state, "state": {**state["state"], "samples_seen": "many"}})
    assert checks._same(other.state_dict(), before)


def test_a_state_whose_tensors_have_other_lengths_is_refused() -> None:
    subject = checks.subject("adacontrast")
    adapter = subject.make()
    adapter(subject.images)
    state = adapter.state_dict()
    columns = state["state"]["memory"]["columns"]
    columns["number"] = columns["number"][:3]
    with pytest.raises(ValueError, match="damaged"):
        subject.make().load_state_dict(state)


def test_arrivals_after_an_epoch_take_no_more_memory() -> None:
    subject = checks.subject("ttac")
    adapter = subject.make()
    adapter.begin_epoch(0, 1, iter(subject.batches()))
    adapter.learn(subject.images)
    sizes = []
    for _ in range(3):
        adapter(subject.images)
        sizes.append(adapter.memory_bytes())
    assert sizes[0] == sizes[1] == sizes[2]
