"""Depths of networks of every kind, found by structure, and their channel vectors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ttac.model.architectures import new_network
from ttac.model.classifier import Classifier
from ttac.model.depths import channel_vectors, depth_names, recorded
from ttac.model.networks import ResNet, VisionTransformer


def convolution(inputs: int, outputs: int, **activation: bool) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(**activation)]


END = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3))


def plain(**activation: bool) -> nn.Sequential:
    return nn.Sequential(*convolution(3, 4, **activation), *convolution(4, 6, **activation), *END)


class Twice(nn.Module):
    """Runs one block twice and one once, which returns a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1)), _Pair(), nn.Sequential(nn.Conv2d(6, 6, 1))])
        self.fc = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        pair, _ = self.blocks[1](self.blocks[0](self.blocks[0](x)))
        return self.fc(self.blocks[2](pair).mean((2, 3)))


class _Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.conv(x), None


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.fc = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 6, 3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.second(F.relu(self.first(x)))).mean((2, 3)))


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ResNet(14, 3, width=4), ["layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer3.1"]),
        (new_network("resnet18_32", 3, options={"width": 4}), [f"layer{n}.{m}" for n in range(1, 5) for m in (0, 1)]),
        (VisionTransformer(3, width=12, depth=3), ["blocks.0", "blocks.1", "blocks.2"]),
        (nn.Sequential(nn.Sequential(*convolution(3, 4)), nn.Sequential(*convolution(4, 6)), *END), ["0", "1"]),
        (nn.Sequential(nn.Sequential(nn.Sequential(*convolution(3, 6)), nn.MaxPool2d(2)), *END), ["0.0"]),
        (plain(), ["2", "5"]),
        (plain(inplace=True), ["2", "5"]),
        (Functional(), ["first", "second"]),
        (Twice(), ["blocks.1", "blocks.2"]),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 8), nn.ReLU(), nn.Linear(8, 3)), []),
    ],
)
def test_depths_are_found_by_structure(model: nn.Module, expected: list[str]) -> None:
    classifier = Classifier(model, "3" if isinstance(model, nn.Sequential) and not expected else None, mean=0, std=1)
    assert list(depth_names(classifier)) == expected
    assert list(depth_names(classifier, torch.rand(2, 3, 32, 32))) == expected
    assert not any(module._forward_hooks for module in classifier.modules())


def test_a_backbone_in_a_sequence_is_looked_into() -> None:
    backbone = ResNet(8, 3, width=4)
    classifier = Classifier(
        nn.Sequential(nn.Identity(), _Maps(backbone), nn.Flatten(), nn.LazyLinear(3)), head="3", mean=0, std=1
    )
    classifier.model(torch.zeros(1, 3, 32, 32))
    assert depth_names(classifier) == ("1.net.layer1.0", "1.net.layer2.0", "1.net.layer3.0")


class _Maps(nn.Module):
    def __init__(self, net: ResNet) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return self.net.layer3(self.net.layer2(self.net.layer1(self.net.conv1(x))))


def test_maps_of_one_position_tell_nothing_that_features_do_not() -> None:
    classifier = Classifier(ResNet(8, 3, width=4), mean=0, std=1)
    assert depth_names(classifier, torch.rand(2, 3, 4, 4)) == ("layer1.0", "layer2.0")


@pytest.mark.parametrize(
    ("library", "name", "options", "first", "count"),
    [
        ("torchvision", "resnet18", {}, ("layer1.0", (64, 16, 16)), 8),
        ("torchvision", "mobilenet_v2", {}, ("features.0", (32, 32, 32)), 19),
        ("torchvision", "swin_t", {}, ("features.0", (96, 16, 16)), 16),  # [N, H, W, C] inside
        ("timm", "resnet18", {}, ("layer1.0", (64, 16, 16)), 8),
        ("timm", "efficientnet_lite0", {}, ("blocks.0.0", (16, 32, 32)), 16),
        ("timm", "vit_tiny_patch16_224", {"img_size": 64, "depth": 2}, ("blocks.0", (17, 192)), 2),
    ],
)
def test_depths_of_other_libraries(
    library: str, name: str, options: dict[str, Any], first: tuple[str, tuple[int, ...]], count: int
) -> None:
    package = pytest.importorskip("torchvision.models" if library == "torchvision" else "timm")
    make = package.get_model if library == "torchvision" else package.create_model
    classifier = Classifier(make(name, num_classes=3, **options).eval(), mean=0, std=1)
    images = torch.rand(2, 3, 64, 64)
    names = depth_names(classifier, images)
    assert len(names) == count
    with torch.no_grad(), recorded(classifier, names) as outputs:
        classifier(images)
    assert tuple(outputs) == names
    assert (names[0], tuple(outputs[names[0]].shape[1:])) == first


def test_the_last_pass_is_recorded_and_hooks_go_even_after_an_error(tiny_classifier: Classifier) -> None:
    with recorded(tiny_classifier, ("layer1.0", "layer3.0")) as outputs:
        for side in (16, 8):
            tiny_classifier(torch.rand(2, 3, side, side))
        assert outputs["layer1.0"].shape == (2, 4, 8, 8)
        assert outputs["layer3.0"].requires_grad
    with pytest.raises(RuntimeError, match="in the middle"), recorded(tiny_classifier, ("layer1.0",)):
        raise RuntimeError("in the middle")
    with pytest.raises(AttributeError), recorded(tiny_classifier, ("layer1.0", "layer9.0")):
        pass
    assert not any(module._forward_hooks for module in tiny_classifier.modules())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_channel_vectors_equal_a_loop(layout: torch.memory_format) -> None:
    maps = torch.rand(2, 3, 4, 5).contiguous(memory_format=layout)
    expected = [maps[n, :, h, w] for n in range(2) for h in range(4) for w in range(5)]
    assert torch.equal(channel_vectors(maps), torch.stack(expected))
    tokens = torch.rand(2, 7, 3)
    assert torch.equal(channel_vectors(tokens), torch.stack([tokens[n, t] for n in range(2) for t in range(7)]))
