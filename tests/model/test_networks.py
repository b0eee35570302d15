"""Networks of this package: their shapes, their sizes, and that they are found by name."""

from __future__ import annotations

import pytest
import torch

from ttac import Classifier
from ttac.model.architectures import OWN, new_network
from ttac.model.networks import VisionTransformer


@pytest.mark.parametrize(
    ("arch", "features", "parameters"),
    [
        ("resnet8", 64, 78_042),
        ("resnet20", 64, 272_474),
        ("resnet26", 64, 369_690),
        ("resnet50_32", 2048, 23_520_842),
        ("vit_small_32", 192, 2_697_610),
    ],
)
def test_networks_have_their_shapes_and_sizes(arch: str, features: int, parameters: int) -> None:
    network = new_network(arch, 10)
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters
    classifier = Classifier(network, mean=0, std=1).eval()
    with torch.no_grad():
        z, logits = classifier.features_and_logits(torch.rand(2, 3, 32, 32))
    assert (z.shape, logits.shape) == ((2, features), (2, 10))
    torch.testing.assert_close(classifier.logits(z), logits)


@pytest.mark.parametrize("arch", ["resnet50_32", "vit_small_32"])
def test_every_parameter_learns_and_grey_images_are_taken(arch: str) -> None:
    options = {"width": 24, "depth": 2} if arch.startswith("vit") else {}
    network = new_network(arch, 3, channels=1, options=options)
    network(torch.rand(2, 1, 32, 32)).square().sum().backward()
    idle = [name for name, value in network.named_parameters() if value.grad is None or not value.grad.any()]
    assert idle == []


def test_the_transformer_attends_as_written_out() -> None:
    torch.manual_seed(0)
    block = VisionTransformer(3, width=24, depth=1).blocks[0]
    x = torch.rand(2, 5, 24)
    normed = block.norm1(x)
    query, key, value = (part.unflatten(-1, (12, 2)) for part in block.qkv(normed).chunk(3, -1))
    scores = torch.einsum("nihd,njhd->nhij", query, key) / 2**0.5
    attended = torch.einsum("nhij,njhd->nihd", scores.softmax(-1), value).flatten(2)
    half = x + block.proj(attended)
    torch.testing.assert_close(block(x), half + block.mlp(block.norm2(half)))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="takes images of 32 x 32, not 16 x 16"):
        VisionTransformer(3, width=24, depth=1)(torch.rand(1, 3, 16, 16))
    with pytest.raises(ValueError, match="multiple of the 12 attention heads, not 25"):
        new_network("vit_small_32", 3, options={"width": 25})
    with pytest.raises(ValueError, match=r"resnet50_32 has no option width; those with options: resnet8 \(width"):
        new_network("resnet50_32", 3, options={"width": 8})
    with pytest.raises(ValueError, match="unknown architecture 'resnet51_32'"):
        new_network("resnet51_32", 3)


def test_own_names_do_not_hide_those_of_timm() -> None:
    timm = pytest.importorskip("timm")
    assert not [name for name in OWN if timm.is_model(name) and name != "resnet26"]
