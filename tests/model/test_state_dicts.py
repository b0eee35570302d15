"""Checkpoints as people have them: names under prefixes, Lightning, programs, pickles."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac.model.networks import ResNet
from ttac.model.state_dicts import StateDict
from ttac.model.weights import save_model

RAW: dict[str, Any] = {"mean": 0, "std": 1}


@pytest.fixture
def network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet(8, 3, width=4).eval()


def under(prefix: str, network: nn.Module) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in network.state_dict().items()}


def assert_same(classifier: ttac.Classifier, network: nn.Module) -> None:
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(classifier(images), network(images))


class OwnName(nn.Module):
    """A network whose own names begin with a usual prefix."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.model = ResNet(8, num_classes, width=4)

    def forward(self, images: Tensor) -> Tensor:
        return self.model(images)


@pytest.mark.parametrize(
    "prefix", ["module.", "model.", "net.", "_orig_mod.", "module.model.", "_orig_mod.module.", "model.net._orig_mod."]
)
def test_prefixes_are_stripped_and_said(prefix: str, network: nn.Module, tmp_path: Path) -> None:
    torch.save({"state_dict": under(prefix, network)}, tmp_path / "m.pth.tar")
    loaded = ttac.load_model(tmp_path / "m.pth.tar", "resnet8", **RAW)
    assert_same(loaded.classifier, network)
    assert loaded.notes == (f"stripped {prefix!r} from the names of the weights",)


@pytest.mark.parametrize("wrapped", [False, True])
def test_names_that_are_the_networks_own_are_left(wrapped: bool, tmp_path: Path) -> None:
    network = OwnName().eval()
    torch.save(under("module." if wrapped else "", network), tmp_path / "m.pt")
    loaded = ttac.load_model(tmp_path / "m.pt", f"{__name__}:OwnName", **RAW)
    assert_same(loaded.classifier, network)
    assert loaded.notes == (("stripped 'module.' from the names of the weights",) if wrapped else ())


def test_a_lightning_checkpoint_loads_without_the_weights_of_its_loss(network: nn.Module, tmp_path: Path) -> None:
    content = {
        "state_dict": {**under("model.", network), "loss.weight": torch.ones(3)},
        "hyper_parameters": {"lr": 0.1, "name": "resnet8", "sizes": [1, 2], "scheduler": None},
        "pytorch-lightning_version": "2.4.0",
        "optimizer_states": [{"state": {0: {"momentum_buffer": torch.zeros(2)}}}],
        "epoch": 3,
    }
    torch.save(content, tmp_path / "last.ckpt")
    loaded = ttac.load_model(tmp_path / "last.ckpt", "resnet8", **RAW)
    assert_same(loaded.classifier, network)
    assert loaded.notes == (
        "stripped 'model.' from the names of the weights; left out what is not under it: loss.weight",
    )


def test_pickled_hyper_parameters_are_refused_unless_trusted(network: nn.Module, tmp_path: Path) -> None:
    content = {"state_dict": network.state_dict(), "hyper_parameters": argparse.Namespace(lr=0.1)}
    torch.save(content, tmp_path / "last.ckpt")
    message = (
        r"could run code \(it holds argparse.Namespace\): .* or say --trust-pickle \(trust_pickle=True in Python\)"
    )
    with pytest.raises(ValueError, match=message):
        ttac.load_model(tmp_path / "last.ckpt", "resnet8", **RAW)
    assert_same(ttac.load_model(tmp_path / "last.ckpt", "resnet8", trust_pickle=True, **RAW).classifier, network)


@pytest.mark.parametrize("wrap", [lambda network: network, lambda network: {"model": network, "epoch": 1}])
def test_a_pickled_module_loads_only_where_it_is_trusted(wrap: Any, network: nn.Module, tmp_path: Path) -> None:
    torch.save(wrap(network), tmp_path / "whole.pt")
    with pytest.raises(ValueError, match=r"it holds ttac\.model\.networks\.ResNet"):
        ttac.load_model(tmp_path / "whole.pt", "resnet8", **RAW)
    loaded = ttac.load_model(tmp_path / "whole.pt", trust_pickle=True, **RAW)
    assert_same(loaded.classifier, network)
    assert loaded.description.arch == "ttac.model.networks:ResNet"
    with pytest.raises(ValueError, match=r"nothing says how ttac\.model\.networks:ResNet wants its pixels"):
        ttac.load_model(tmp_path / "whole.pt", trust_pickle=True)


def test_a_damaged_file_is_no_crash_where_pickles_are_trusted(tmp_path: Path) -> None:
    (tmp_path / "m.pt").write_bytes(b"nothing")
    with pytest.raises(ValueError, match=r"m\.pt could not be unpickled"):
        ttac.load_model(tmp_path / "m.pt", "resnet8", trust_pickle=True, **RAW)


@pytest.mark.parametrize("trust", [False, True])
@pytest.mark.parametrize("name", ["m.pt2", "m.pt"])
def test_exported_programs_are_refused_with_the_reason(name: str, trust: bool, tmp_path: Path) -> None:
    small = nn.Sequential(nn.Flatten(), nn.Linear(12, 2)).eval()
    images = torch.rand(2, 3, 2, 2)
    if name == "m.pt2":
        torch.export.save(torch.export.export(small, (images,)), tmp_path / name)
    else:
        torch.jit.save(torch.jit.trace(small, images), tmp_path / name)
    kind = "a torch.export program" if name == "m.pt2" else "a TorchScript program"
    with pytest.raises(ValueError, match=rf"is {kind}, which cannot be adapted: .*Save the state_dict\(\)"):
        ttac.load_model(tmp_path / name, "resnet8", trust_pickle=trust, **RAW)


def test_names_of_many_prefixes_end() -> None:
    weights = StateDict({"model." * 10_000 + "fc.weight": torch.zeros(1)})
    assert [reading.prefix.count("model.") for reading in weights.readings()] == [0, 1, 2, 3, 4]


def test_a_network_of_a_file_is_imported_from_there(network: nn.Module, tmp_path: Path) -> None:
    torch.save(network.state_dict(), tmp_path / "m.pt")
    (tmp_path / "nets.py").write_text(
        "from ttac.model.networks import ResNet\ndef make(num_classes):\n    return ResNet(8, num_classes, width=4)\n"
    )
    loaded = ttac.load_model(tmp_path / "m.pt", f"{tmp_path}/nets.py:make", **RAW)
    assert_same(loaded.classifier, network)
    assert loaded.description.arch == f"{tmp_path}/nets.py:make"
    with pytest.raises(FileNotFoundError, match=r"no file .*nowhere\.py"):
        ttac.load_model(tmp_path / "m.pt", f"{tmp_path}/nowhere.py:make", **RAW)
    with pytest.raises(ValueError, match="no attribute 'other'"):
        ttac.load_model(tmp_path / "m.pt", f"{tmp_path}/nets.py:other", **RAW)
    (tmp_path / "broken.py").write_text("import no_such_package")
    with pytest.raises(ValueError, match="No module named 'no_such_package'"):
        ttac.load_model(tmp_path / "m.pt", f"{tmp_path}/broken.py:make", **RAW)


@pytest.mark.parametrize(
    ("arch", "usual"),
    [("resnet8", None), ("vgg11", "mean=[0.485, 0.456, 0.406]"), ("vit_tiny_patch16_224", "mean=[0.5, 0.5, 0.5]")],
)
def test_weights_that_do_not_say_their_pixels_are_refused_with_the_usual_ones(arch: str, usual: str | None) -> None:
    pytest.importorskip("timm")
    from ttac.model.architectures import usual_pixels
    from ttac.model.pixels import UnknownPixelsError

    message = str(UnknownPixelsError(arch, usual_pixels(arch)))
    assert (usual or "mean=..., std=...,") in message
    assert "or mean=0, std=1 if it takes raw pixels" in message


def test_a_file_of_weights_needs_pixels_even_of_a_network_that_has_a_config(tmp_path: Path) -> None:
    """The config is of timm's own weights, and these are others."""
    timm = pytest.importorskip("timm")
    torch.save(timm.create_model("resnet18", num_classes=4).state_dict(), tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"nothing says how resnet18 wants .* if it was trained with the usual values"):
        ttac.load_model(tmp_path / "m.pt", "resnet18")
    assert ttac.load_model(tmp_path / "m.pt", "resnet18", **RAW).classifier.mean.item() == 0


def test_a_network_without_a_linear_head_comes_back(tmp_path: Path) -> None:
    models = pytest.importorskip("torchvision").models
    torch.save(models.squeezenet1_1(num_classes=4).state_dict(), tmp_path / "m.pt")
    loaded = ttac.load_model(tmp_path / "m.pt", "squeezenet1_1", **RAW)
    assert (loaded.classifier.num_classes, loaded.classifier.has_linear_head) == (4, False)
    save_model(tmp_path / "again.safetensors", loaded.classifier.model, loaded.description)
    again = ttac.load_model(tmp_path / "again.safetensors")
    assert again.classifier.fingerprint() == loaded.classifier.fingerprint()
