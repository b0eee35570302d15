"""Weights cross shared memory bit for bit, and those of another model are refused with nothing changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch
from shared_helpers import shared_memory
from torch import Tensor, nn

from ttac.serving.shared import Slots
from ttac.serving.weights import WeightsLayout


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


class Odd(nn.Module):
    """Tensors without elements, of one element, of other types, of numbers that are not equal to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("empty", torch.empty(0, 3))
        self.register_buffer("flag", torch.tensor(True))
        self.register_buffer("bits", torch.tensor([float("nan"), -0.0, float("inf"), 1e-45]))
        self.register_buffer("short", torch.rand(3, 5).half())
        self.register_buffer("phases", torch.rand(3).to(torch.complex64))
        self.register_buffer("transposed", torch.rand(4, 6).t())
        self.frozen = nn.Parameter(torch.rand(7), requires_grad=False)


def normalised(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.Flatten(), nn.Linear(20, 2))
    for _ in range(seed + 1):
        model(torch.rand(4, 3, 4, 4))  # running statistics and the number of batches, which is an int64
    return model


MODELS = {
    "batch norm": normalised,
    "channels last": lambda: normalised().to(memory_format=torch.channels_last),
    "bfloat16": lambda: normalised().bfloat16(),
    "tied": Tied,
    "odd": Odd,
    "without weights": lambda: nn.ReLU(),
}


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def places(model: nn.Module) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {name: (tensor.data_ptr(), tensor.stride()) for name, tensor in model.state_dict().items()}


def changed(model: nn.Module) -> nn.Module:
    other = copy.deepcopy(model)
    for tensor in other.state_dict().values():
        tensor.copy_(~tensor if tensor.dtype == torch.bool else tensor + 1)
    return other


@pytest.mark.parametrize("kind", MODELS)
def test_round_trip_is_exact_and_in_place(kind: str) -> None:
    model = MODELS[kind]()
    layout = WeightsLayout.of(model)
    other = changed(model)
    before = places(other)
    wants_gradient = [parameter.requires_grad for parameter in other.parameters()]
    content = layout.pack(model.state_dict())
    assert len(content) == layout.size
    layout.load(content, other)
    for name, tensor in other.state_dict().items():
        assert bits(tensor) == bits(model.state_dict()[name]), name
    assert places(other) == before  # also the order of the elements in memory, and which of them are one
    assert [parameter.requires_grad for parameter in other.parameters()] == wants_gradient


def test_content_crosses_the_slots() -> None:
    model, other = normalised(), normalised(seed=3)
    layout = WeightsLayout.of(model)
    slots = Slots(shared_memory(Slots.bytes_needed(layout.size)), layout.size)
    slots.publish(1, layout.pack(model.state_dict()))
    found = slots.read()
    assert found is not None
    WeightsLayout.of(other).load(memoryview(found[1]), other)
    images = torch.rand(6, 3, 4, 4)
    assert torch.equal(model.eval()(images), other.eval()(images))


def test_content_does_not_follow_the_model() -> None:
    model = normalised()
    layout = WeightsLayout.of(model)
    content = layout.pack(model.state_dict())
    before = bytes(content)
    with torch.no_grad():
        model[0].weight.zero_()
    layout.load(content, model)
    content[:] = bytes(len(content))
    assert bytes(layout.pack(model.state_dict())) == before


def test_contents_of_other_weights_differ() -> None:
    layout = WeightsLayout.of(normalised())
    first, second = (layout.pack(normalised(seed).state_dict()) for seed in (0, 1))
    assert len(first) == len(second)
    assert first != second


def test_trained_parameters_are_loaded() -> None:
    model = normalised()
    layout = WeightsLayout.of(model)
    content = layout.pack(normalised(seed=1).state_dict())
    model(torch.rand(4, 3, 4, 4)).sum().backward()
    layout.load(content, model)
    assert bytes(layout.pack(dict(model.named_parameters()) | dict(model.named_buffers()))) == bytes(content)


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {other: tensor for other, tensor in state.items() if other != name}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (lambda state: without(state, "0.bias"), r"0.bias: missing for torch.float32 \(5,\)"),
        (lambda state: {**state, "extra": torch.zeros(2)}, r"extra: torch.float32 \(2,\) for nothing"),
        (lambda state: {**state, "0.bias": torch.zeros(6)}, r"0.bias: torch.float32 \(6,\) for torch.float32 \(5,\)"),
        (lambda state: {**state, "0.bias": torch.zeros(5).half()}, r"0.bias: torch.float16 \(5,\) for"),
        (lambda state: {}, r"another model \(.*, \.\.\.\)"),
    ],
)
def test_weights_of_another_model_are_refused(changes: Any, message: str) -> None:
    model = normalised()
    with pytest.raises(ValueError, match=message):
        WeightsLayout.of(model).pack(changes(model.state_dict()))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content + b"\0",
        lambda content: bytearray(),
        lambda content: bytearray([content[0] ^ 1]) + content[1:],
        lambda content: WeightsLayout.of(renamed()).pack(renamed().state_dict()),
    ],
)
def test_content_of_another_model_is_refused(damage: Any) -> None:
    model = normalised()
    layout = WeightsLayout.of(model)
    content = layout.pack(normalised(seed=1).state_dict())
    before = bytes(layout.pack(model.state_dict()))
    with pytest.raises(ValueError, match="of another model"):
        layout.load(damage(content), model)
    assert bytes(layout.pack(model.state_dict())) == before


def renamed() -> nn.Sequential:
    """A model whose tensors have the same sizes, in the same order, and other names."""
    return nn.Sequential(OrderedDict((f"part{name}", part) for name, part in normalised().named_children()))


def test_model_of_another_layout_is_not_changed() -> None:
    layout = WeightsLayout.of(normalised())
    content = layout.pack(normalised().state_dict())
    other = normalised(seed=1)
    other[3] = nn.Linear(20, 3)  # the last tensors alone do not fit
    before = [bits(tensor) for tensor in other.state_dict().values()]
    with pytest.raises(ValueError, match=r"3\.weight: torch\.float32"):
        layout.load(content, other)
    assert [bits(tensor) for tensor in other.state_dict().values()] == before


def test_models_that_cannot_be_served_are_refused() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

        def set_extra_state(self, state: object) -> None:
            pass

    with pytest.raises(ValueError, match=r"more than tensors \(_extra_state\)"):
        WeightsLayout.of(Extra(2, 2))
    copying = nn.Linear(2, 2)
    copying._register_state_dict_hook(
        lambda module, state, prefix, metadata: {name: tensor.clone() for name, tensor in state.items()}
    )
    with pytest.raises(ValueError, match=r"gives copies \(weight, bias\)"):
        WeightsLayout.of(copying)
