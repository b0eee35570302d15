"""Pretrained networks of other libraries by name and from folders, with their preprocessing; no network is needed."""

from __future__ import annotations

import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ttac
from ttac.data.folder import FolderStream
from ttac.model.processors import read_processor
from ttac.source import hubs
from ttac.source.loading import save_model

TINY = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 24, "intermediate_size": 48}


def images(side: int, count: int = 2) -> Tensor:
    return torch.rand(count, 3, side, side, generator=torch.Generator().manual_seed(0))


def assert_comes_back(loaded: ttac.source.loading.LoadedModel, folder: Path, side: int) -> None:
    """What adaptation writes is read again, without the library's own files."""
    save_model(folder / "adapted.safetensors", loaded.classifier.model, loaded.description)
    again = ttac.load_model(folder / "adapted.safetensors")
    assert again.description == loaded.description
    assert again.classifier.fingerprint() == loaded.classifier.fingerprint()
    assert torch.equal(again.classifier(images(side)), loaded.classifier(images(side)))


class TestTransformers:
    transformers = pytest.importorskip("transformers")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        names = {0: "cat", 1: "dog", 2: "fox"}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            config = self.transformers.ViTConfig(image_size=32, patch_size=8, id2label=names, **TINY)
            self.transformers.ViTForImageClassification(config).save_pretrained(tmp_path / "vit")
        processor = self.transformers.ViTImageProcessor(
            size={"height": 32, "width": 32}, image_mean=[0.5, 0.4, 0.3], image_std=[0.2, 0.25, 0.3]
        )
        processor.save_pretrained(tmp_path / "vit")
        return tmp_path / "vit"

    def test_a_folder_brings_pixels_size_and_names(self, folder: Path) -> None:
        loaded = ttac.load_model(folder)
        assert loaded.description.classes == ("cat", "dog", "fox")
        assert (loaded.description.size, loaded.description.crop_pct) == ((32, 32), 1.0)
        pixels = (255 * images(32)).byte()
        processor = self.transformers.AutoImageProcessor.from_pretrained(folder)
        with torch.no_grad():
            prepared = processor(list(pixels), return_tensors="pt")
            expected = loaded.classifier.model(**prepared).logits
            torch.testing.assert_close(loaded.classifier(pixels.float() / 255), expected, rtol=1e-4, atol=1e-5)

    def test_it_comes_back_from_what_adaptation_writes(self, folder: Path, tmp_path: Path) -> None:
        assert_comes_back(ttac.load_model(folder), tmp_path, 32)

    def test_a_forged_config_is_refused_before_memory_is_taken(self, folder: Path, tmp_path: Path) -> None:
        loaded = ttac.load_model(folder)
        for change in ({"intermediate_size": 10**9}, {"hidden_size": "wide"}, {"num_attention_heads": 0}):
            forged = {**loaded.description.config, **change}
            object.__setattr__(loaded.description, "config", forged)
            save_model(tmp_path / "m.safetensors", loaded.classifier.model, loaded.description)
            with pytest.raises(ValueError, match=r"do not fit|cannot make the network"):
                ttac.load_model(tmp_path / "m.safetensors")

    def test_what_is_given_wins(self, folder: Path) -> None:
        assert ttac.load_model(folder, mean=0, std=1).classifier.mean.item() == 0

    def test_a_folder_without_a_processor_or_weights_says_so(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").unlink()
        with pytest.raises(ValueError, match=r"vit could not be loaded .*processor"):
            ttac.load_model(folder)
        (folder / "config.json").write_text("{")
        with pytest.raises(ValueError, match=r"config\.json is damaged"):
            ttac.load_model(folder)
        (folder / "config.json").unlink()
        with pytest.raises(FileNotFoundError, match="no bundle in"):
            ttac.load_model(folder)

    @pytest.mark.parametrize(
        ("kind", "options", "size", "crop_pct"),
        [
            ("ViT", {"do_rescale": False}, (224, 224), 1.0),
            ("ViT", {"do_normalize": False}, (224, 224), 1.0),
            ("ConvNext", {"size": {"shortest_edge": 224}}, (224, 224), 224 / 256),
            ("ConvNext", {"size": {"shortest_edge": 384}}, (384, 384), 1.0),
            ("CLIP", {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}}, (224, 224), 0.875),
            ("EfficientNet", {"rescale_offset": True, "rescale_factor": 1 / 127.5}, (346, 346), 1.0),
        ],
    )
    def test_processors_are_read_as_what_they_do(
        self, kind: str, options: dict[str, Any], size: tuple[int, int], crop_pct: float
    ) -> None:
        processor = getattr(self.transformers, f"{kind}ImageProcessor")(**options)
        read = read_processor(processor)
        assert (read.size, read.crop_pct) == (size, pytest.approx(crop_pct))
        levels = torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
        expected = processor(levels, do_resize=False, do_center_crop=False, return_tensors="pt")["pixel_values"][0]
        mean, std = (torch.tensor(values).reshape(-1, 1, 1) for values in read.pixels)
        torch.testing.assert_close((levels / 255 - mean) / std, expected.float(), rtol=1e-4, atol=1e-4)

    def test_processors_that_swap_channels_are_refused(self) -> None:
        with pytest.raises(ValueError, match="turns the channels round"):
            read_processor(self.transformers.MobileViTImageProcessor())


@pytest.mark.usefixtures("untrained")
class TestTimm:
    def test_a_name_brings_its_own_pixels(self, tmp_path: Path) -> None:
        loaded = ttac.load_model("mobilenetv3_small_050")
        assert (loaded.description.size, loaded.description.crop_pct) == ((224, 224), 0.875)
        assert loaded.description.mean == pytest.approx((0.485, 0.456, 0.406))
        assert loaded.description.arch == "mobilenetv3_small_050"
        assert_comes_back(loaded, tmp_path, 64)

    def test_a_folder_that_timm_saved(self, tmp_path: Path) -> None:
        import timm

        made = timm.create_model("vit_tiny_patch16_224", num_classes=3, img_size=32, depth=12)
        config = {"label_names": ["a", "b", "c"], "model_args": {"img_size": 32, "num_classes": 3}}
        timm.models.save_for_hf(made, tmp_path / "folder", model_config=config)
        loaded = ttac.load_model(tmp_path / "folder")
        assert loaded.description.classes == ("a", "b", "c")
        assert (loaded.description.arch, loaded.description.mean) == ("vit_tiny_patch16_224", (0.5, 0.5, 0.5))
        assert torch.equal(loaded.classifier(images(32)), made.eval()((images(32) - 0.5) / 0.5))
        assert_comes_back(loaded, tmp_path, 32)

    @pytest.mark.parametrize("name", ["hf_hub:owner/net", "hf-hub:owner/net", "timm/net"])
    def test_a_name_of_the_hub_goes_to_timm(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        import timm

        asked = []

        def create(source: str, pretrained: bool) -> nn.Module:
            asked.append(source)
            network = timm.models.resnet18(num_classes=3)
            network.pretrained_cfg["architecture"] = "resnet18"
            return network

        monkeypatch.setattr(timm, "create_model", create)
        monkeypatch.setattr(timm.models, "load_model_config_from_hf", lambda name: ({}, "resnet18", {"depth": 3}))
        loaded = ttac.load_model(name)
        assert asked == ["hf_hub:timm/net" if name == "timm/net" else name]
        assert (loaded.description.arch, loaded.description.config) == ("resnet18", {})

    def test_options_that_would_fetch_or_read_are_refused(self, tmp_path: Path) -> None:
        loaded = ttac.load_model("resnet18")
        for option in ("pretrained", "checkpoint_path", "pretrained_cfg"):
            object.__setattr__(loaded.description, "config", {option: "/tmp/other"})
            save_model(tmp_path / "m.safetensors", loaded.classifier.model, loaded.description)
            with pytest.raises(ValueError, match=f"damaged: it has no option {option}"):
                ttac.load_model(tmp_path / "m.safetensors")


@pytest.mark.usefixtures("untrained")
class TestTorchvision:
    def test_weights_bring_their_transforms_and_names(self, tmp_path: Path) -> None:
        loaded = ttac.load_model("resnet18:IMAGENET1K_V1")
        description = loaded.description
        assert (description.size, description.crop_pct) == ((224, 224), 0.875)
        assert description.mean == pytest.approx((0.485, 0.456, 0.406))
        assert description.classes is not None
        assert (len(description.classes), description.classes[0]) == (1000, "tench")
        assert_comes_back(loaded, tmp_path, 64)

    def test_a_network_that_is_made_in_another_way_with_weights_comes_back(self, tmp_path: Path) -> None:
        loaded = ttac.load_model("googlenet:IMAGENET1K_V1")
        assert loaded.classifier.model.transform_input
        assert_comes_back(loaded, tmp_path, 64)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("resnet18:V7", "resnet18 of torchvision has no weights 'V7': name one of IMAGENET1K_V1, DEFAULT"),
            ("resnett18:DEFAULT", "torchvision has no classifier 'resnett18'; did you mean resnet18"),
            ("googlenet", "googlenet is a network of torchvision: name its weights too, googlenet:IMAGENET1K_V1"),
        ],
    )
    def test_wrong_names(self, name: str, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            ttac.load_model(name)


class TestOffline:
    @pytest.mark.parametrize(
        ("name", "host"),
        [
            ("owner/net", "huggingface.co"),
            ("hf_hub:owner/net", "huggingface.co"),
            ("resnet18", "huggingface.co"),
            ("resnet50:IMAGENET1K_V2", "download.pytorch.org"),
        ],
    )
    def test_the_message_says_what_to_do_at_once(
        self, name: str, host: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for package in ("timm", "torchvision", "transformers"):
            pytest.importorskip(package)
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
        monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
        monkeypatch.setattr(hubs, "reachable", lambda url: False)
        monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("waits to try again"))
        message = rf"{name} could not be loaded \({host} cannot be reached\). Where there is a network, .*--model FILE"
        with pytest.raises(ValueError, match=message):
            ttac.load_model(name)
        assert constants.HF_HUB_OFFLINE is False

    def test_a_server_is_looked_for_no_longer_than_it_takes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for variable in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.delenv(variable, raising=False)
            monkeypatch.delenv(variable.upper(), raising=False)
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            assert hubs.reachable(f"http://127.0.0.1:{port}/path")
            monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
            assert hubs.reachable("https://nowhere.invalid")
            monkeypatch.delenv("https_proxy")
        assert not hubs.reachable(f"http://127.0.0.1:{port}")
        forever = time.sleep
        monkeypatch.setattr(socket, "create_connection", lambda *_: forever(60))
        started = time.monotonic()
        assert not hubs.reachable("http://127.0.0.1:1", seconds=0.05)
        assert time.monotonic() - started < 30

    def test_a_library_that_is_not_there_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(__import__("sys").modules, "transformers", None)
        with pytest.raises(ValueError, match=r"transformers is not installed \(pip install transformers\)"):
            ttac.load_model("owner/net")


def test_a_crop_of_transforms_is_the_one_that_folders_make(tmp_path: Path) -> None:
    """The share that is kept is a quotient, and its rounding must not lose a row."""
    from PIL import Image

    def check(side: int, over: int) -> Tensor:
        grey = torch.arange(over, dtype=torch.uint8).repeat(over, 1).numpy()
        Image.fromarray(grey).save(tmp_path / "a.png")
        ((read, _),) = FolderStream(tmp_path, ["a.png"], 1, (side, side), 1, side / over)
        return (255 * read[0, 0, 0]).round()

    for side, over in ((224, 232), (224, 256), (299, 342), (240, 255), (384, 384)):
        first = round((over - side) / 2)
        assert torch.equal(check(side, over), (torch.arange(first, first + side) % 256).float()), (side, over)
