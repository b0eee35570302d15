"""A network that is easy to see through, and images of its classes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics

CLASSES, WIDTH = 6, 12  # every class lights a pixel of its own, the other pixels are background


def pictures(labels: Tensor, seed: int = 0) -> Tensor:
    """Make images `[n, 3, 2, 2]` of the classes."""
    pixels = 0.1 + 0.1 * torch.rand(len(labels), WIDTH, generator=torch.Generator().manual_seed(seed))
    pixels[torch.arange(len(labels)), labels] += 0.6
    return pixels.reshape(-1, 3, 2, 2)


def mixed(count: int, seed: int = 0) -> Tensor:
    """Draw labels of all classes."""
    return torch.randint(CLASSES, (count,), generator=torch.Generator().manual_seed(seed))


def network() -> Classifier:
    """Make a network whose features are the pixels and whose head finds the lit one."""
    layer, head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH))
        layer.bias.zero_()
        head.weight.copy_(8 * torch.eye(CLASSES, WIDTH))
        head.bias.zero_()
    return Classifier(nn.Sequential(nn.Flatten(), layer, head), head="2", mean=0, std=1).eval()


def parts(candidate: Classifier) -> tuple[nn.Linear, nn.Linear]:
    """Give the layer that makes the features, and the head."""
    layer = candidate.model.get_submodule("1")
    assert isinstance(layer, nn.Linear)
    return layer, candidate.head


def collected(source: Classifier) -> SourceStatistics:
    """Collect the statistics of its source data."""
    labels = mixed(600, seed=9)
    return SourceStatistics.collect(source, [(pictures(labels, seed=9), labels)])
