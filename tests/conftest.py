"""What all tests share: a tiny classifier, libraries without a network, and a torchvision beside any build of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

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
        return Classifier(ResNet(8, 10, width=4), mean=0, std=1).eval()


@pytest.fixture
def untrained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let timm give networks with random weights and ten classes, and torchvision with random weights, at once."""
    timm, torchvision = pytest.importorskip("timm"), pytest.importorskip("torchvision")
    create, get = timm.create_model, torchvision.models.get_model

    def of_timm(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        from_disk = name.startswith("local-dir:")
        return create(name, pretrained=from_disk, **({"num_classes": 10} if pretrained and not from_disk else options))

    def of_torchvision(name: str, weights: Any = None, **options: Any) -> nn.Module:
        # As its builders do where weights are given.
        given = {"transform_input": True, "aux_logits": name == "inception_v3", "init_weights": False}
        return get(name, **(given if weights and name in ("googlenet", "inception_v3") else options))

    monkeypatch.setattr(timm, "create_model", of_timm)
    monkeypatch.setattr(torchvision.models, "get_model", of_torchvision)
    monkeypatch.setattr("ttac.source.hubs.reachable", lambda url: "pytorch.org" in url)
