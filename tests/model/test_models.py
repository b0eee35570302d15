"""Models from files and by name: what is written is read, and what cannot be used is refused with the reason."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ttac.model.networks import ResNet
from ttac.model.weights import METADATA_KEY, check_size
from ttac.source.loading import ModelDescription, load_model, save_model

RAW = {"mean": (0.0,), "std": (1.0,)}


def network(num_classes: int = 3, **options: Any) -> ResNet:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResNet(8, num_classes, **{"width": 4, **options})


def factory_with_classes(num_classes: int) -> nn.Module:
    return network(num_classes)


def factory_without_classes() -> nn.Module:
    return network(3)


def factory_of_nothing() -> None:
    return None


def same_logits(first: nn.Module, second: nn.Module, channels: int = 3) -> bool:
    images = torch.rand(2, channels, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return torch.equal(first.eval()(images), second.eval()(images))


def test_a_saved_model_comes_back_with_all_that_was_said_of_it(tmp_path: Path) -> None:
    trained = network(3, channels=1, width=8, stem_stride=2)
    description = ModelDescription(
        "resnet8", 3, channels=1, mean=(0.4,), std=(0.2,), size=(16, 24), classes=("a", "b", "ß"),
        crop_pct=0.9, arch_options={"width": 8, "stem_stride": 2},
    )  # fmt: skip
    save_model(tmp_path / "m.safetensors", trained, description)
    loaded = load_model(str(tmp_path / "m.safetensors"))
    assert same_logits(loaded.classifier.model, trained, channels=1)
    assert loaded.classifier.mean.item() == pytest.approx(0.4)
    assert loaded.description.head == "fc"
    for name in ("arch", "num_classes", "channels", "size", "classes", "crop_pct", "arch_options"):
        assert getattr(loaded.description, name) == getattr(description, name), name

    save_model(tmp_path / "again.safetensors", loaded.classifier.model, loaded.description)
    again = load_model(str(tmp_path / "again.safetensors"))
    assert again.classifier.fingerprint() == loaded.classifier.fingerprint()
    assert again.description == loaded.description


def test_the_same_model_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.safetensors", "b.safetensors"):
        save_model(tmp_path / name, network(), ModelDescription("resnet8", 3))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".bin"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda weights: weights,
        lambda weights: {"state_dict": weights, "epoch": 3},
        lambda weights: {"model": weights},
        lambda weights: {"state_dict": {f"module.{name}": tensor for name, tensor in weights.items()}},
        lambda weights: {name: tensor for name, tensor in weights.items() if "num_batches" not in name},
    ],
)
def test_a_plain_state_dict_needs_the_architecture_alone(suffix: str, wrap: Any, tmp_path: Path) -> None:
    trained = network(7, width=6, channels=1)
    torch.save(wrap(trained.state_dict()), tmp_path / f"m{suffix}")
    loaded = load_model(str(tmp_path / f"m{suffix}"), arch="resnet8", mean=[0.5], std=[0.25])
    assert same_logits(loaded.classifier.model, trained, channels=1)
    assert (loaded.description.num_classes, loaded.description.channels, loaded.description.size) == (7, 1, None)
    assert (loaded.description.mean, loaded.description.std) == ((0.5,), (0.25,))


@pytest.mark.parametrize("factory", ["factory_with_classes", "factory_without_classes"])
def test_a_network_of_the_user_is_called_with_the_classes_it_asks_for(factory: str, tmp_path: Path) -> None:
    torch.save(network(3).state_dict(), tmp_path / "m.pt")
    loaded = load_model(str(tmp_path / "m.pt"), arch=f"{__name__}:{factory}", mean=0, std=1)
    assert same_logits(loaded.classifier.model, network(3))


def test_a_file_cannot_have_code_imported(tmp_path: Path) -> None:
    arch = f"{__name__}:factory_with_classes"
    save_model(tmp_path / "m.safetensors", network(), ModelDescription(arch, 3, **RAW))
    with pytest.raises(ValueError, match="run only where you ask for it: add --arch"):
        load_model(str(tmp_path / "m.safetensors"))
    assert load_model(str(tmp_path / "m.safetensors"), arch=arch).classifier.num_classes == 3


class Trap:
    """Runs code when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("plain", [True, False])
def test_a_pickle_with_code_is_refused_and_not_run(plain: bool, tmp_path: Path) -> None:
    path, mark = tmp_path / "m.pt", tmp_path / "was_here"
    content = {**network().state_dict(), "trap": Trap(mark)}
    if plain:
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="holds more than weights and was not loaded, because that could run code"):
        load_model(str(path), arch="resnet8")
    assert not mark.exists()


def test_weights_that_do_not_fit_are_named(tmp_path: Path) -> None:
    weights = network().state_dict()
    weights["extra"] = weights.pop("bn1.weight")
    torch.save(weights, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"do not fit resnet8 .* 1 missing \(bn1.weight\), 1 unexpected \(extra\)"):
        load_model(str(tmp_path / "m.pt"), arch="resnet8")
    with pytest.raises(ValueError, match=r"\d+ missing \(bn1.weight, layer1.1.conv1.weight, .*, \.\.\.\)"):
        load_model(str(tmp_path / "m.pt"), arch="resnet14")
    torch.save(network().state_dict(), tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"of another shape \(fc.weight \(3, 16\) for \(5, 16\)"):
        load_model(str(tmp_path / "m.pt"), arch="resnet8", num_classes=5)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("m.onnx", b"", "weights are read from .safetensors, .pt, .pth, .pth.tar, .ckpt, .bin"),
        ("m.safetensors", b"not tensors at all", "not a readable safetensors file"),
        ("m.pt", b"not a pickle", "is damaged, or holds more"),
        ("m.pt", b"", "is damaged, or holds more"),
    ],
)
def test_files_that_are_no_weights(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / name), arch="resnet8")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "holds no state dict"),
        ({}, "holds no state dict"),
        ({"weights": 3}, r"holds more than tensors \(weights\)"),
        ({"fc.weight": torch.tensor([float("nan")])}, "NaN or infinity in fc.weight"),
    ],
)
def test_contents_that_are_no_weights(content: Any, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "m.pt"), arch="resnet8")


@pytest.mark.parametrize(
    "name", ["nowhere.pt", "a/b/resnet50", "../resnet50", "/resnet50", "last.CKPT", "nowhere.pth.tar"]
)
def test_a_missing_file_is_said_to_be_missing(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"no model file {name}"):
        load_model(name)


def test_a_network_must_be_named(tmp_path: Path) -> None:
    path = str(tmp_path / "m.pt")
    torch.save(network().state_dict(), path)
    with pytest.raises(ValueError, match="does not say which network its weights are of: name it with --arch"):
        load_model(path)
    with pytest.raises(ValueError, match="'no_such_package:net' cannot be imported"):
        load_model(path, arch="no_such_package:net")
    with pytest.raises(ValueError, match=r"gives NoneType; expected a torch.nn.Module"):
        load_model(path, arch=f"{__name__}:factory_of_nothing")
    with pytest.raises(ValueError, match="is str; expected something to call"):
        load_model(path, arch=f"{__name__}:METADATA_KEY")
    with pytest.raises(ValueError, match="device 'abacus' cannot be used"):
        load_model(path, arch="resnet8", mean=0, std=1, device="abacus")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": "many"}, "num_classes"),
        ({"num_classes": 0}, "num_classes"),
        ({"classes": ["a"]}, "1 class names for 3 classes"),
        ({"size": [0, 16]}, "size"),
        ({"crop_pct": 0}, "crop_pct"),
        ({"colour": True}, "colour"),
        ({"channels": 0}, "channels"),
        ({"channels": 10**9}, "channels"),
        ({"mean": [10**400]}, "the description of the model is damaged"),
        ({"crop_pct": 10**400}, "the description of the model is damaged"),
        ({"arch_options": {"width": 10**9}}, "width"),
        ({"arch_options": {"pretrained": 1}}, "resnet8 has no option pretrained"),
    ],
)
def test_descriptions_that_make_no_sense(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    text = json.dumps({"arch": "resnet8", "num_classes": 3, **change})
    save_file(network().state_dict(), tmp_path / "m.safetensors", {METADATA_KEY: text})
    with pytest.raises(ValueError, match=message):
        load_model(str(tmp_path / "m.safetensors"))


@pytest.mark.parametrize("text", ["{", "[]", "null", '"text"'])
def test_descriptions_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="the description of the model is damaged"):
        ModelDescription.parse(text)


def test_names_of_timm_and_torchvision_are_told_apart_by_the_weights(tmp_path: Path) -> None:
    timm = pytest.importorskip("timm")
    torchvision = pytest.importorskip("torchvision")
    for create in (timm.create_model, torchvision.models.get_model):
        trained = create("efficientnet_b0", num_classes=5)
        torch.save(trained.state_dict(), tmp_path / "m.pt")
        loaded = load_model(str(tmp_path / "m.pt"), arch="efficientnet_b0", mean=0, std=1)
        assert loaded.classifier.num_classes == 5
        assert type(loaded.classifier.model) is type(trained)


def test_a_wrong_name_suggests_close_ones(tmp_path: Path) -> None:
    pytest.importorskip("timm")
    with pytest.raises(ValueError, match=r"no timm model of that name; did you mean .*resnet50"):
        load_model("resnett50")
    torch.save(network().state_dict(), tmp_path / "m.pt")
    with pytest.raises(ValueError, match=r"unknown architecture 'resnett50'.*did you mean .*resnet50"):
        load_model(str(tmp_path / "m.pt"), arch="resnett50")


def test_without_timm_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    with pytest.raises(ValueError, match=r"timm is not installed \(pip install timm\)"):
        load_model("vit_tiny_patch16_224")


def test_a_forged_size_is_refused_where_no_memory_is_enough(tmp_path: Path) -> None:
    for number, size in enumerate([(2**40, 2**40), (2**31, 2**20), (10**30, 1)]):
        path = tmp_path / f"{number}.safetensors"
        save_model(path, network(), ModelDescription("resnet8", 3, size=size, **RAW))
        loaded = load_model(str(path))
        with pytest.raises(ValueError, match=r"the model does not take \d+ x \d+ images .*set --size"):
            check_size(loaded.classifier, size)
