"""What all tests share: a tiny classifier, and a torchvision that can be imported beside any build of torch."""

from __future__ import annotations

import pytest
import torch

from ttac.model.classifier import Classifier
from ttac.model.networks import ResNet

# torchvision's wheel needs the torch build it was compiled for: beside another one its binary does not load, and its
# import stops at fake kernels for operators that nobody has declared. Declaring them lets it and timm be imported.
try:
    import torchvision  # noqa: F401
except ImportError:
    pass
except RuntimeError:
    _operators = torch.library.Library("torchvision", "DEF")  # kept, as its end would undeclare them
    for _name in ("nms", "qnms"):
        _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@pytest.fixture
def tiny_classifier() -> Classifier:
    """A residual network with 16 features and 10 classes, the same random weights each time, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Classifier(ResNet(8, 10, width=4)).eval()
