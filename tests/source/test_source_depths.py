"""Statistics at every depth: against numpy over all vectors, in files, and what a window has by chance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics
from ttac.model.branches import ContrastiveBranch
from ttac.model.networks import ResNet, VisionTransformer
from ttac.model.weights import ModelDescription
from ttac.source import depths
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.objectives import CrossEntropy

NAMES = ("layer1.0", "layer2.0", "layer3.0")


def batches(count: int = 120, size: int = 32, side: int = 16) -> list[tuple[Tensor, Tensor]]:
    """Images sorted by class, of which each class has another brightness."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) * 10 // count
    images = torch.rand(count, 3, side, side, generator=generator) * (1 + labels[:, None, None, None]) / 10
    return list(zip(images.split(size), labels.split(size), strict=True))


def vectors_of(module: nn.Module, classifier: Classifier, images: Tensor) -> np.ndarray[Any, Any]:
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: seen.append(output.double()))
    with torch.no_grad():
        classifier(images)
    handle.remove()
    (output,) = seen
    output = output if output.ndim == 3 else output.flatten(2).transpose(1, 2)
    return output.reshape(-1, output.shape[2]).numpy()


@pytest.mark.parametrize("widest", [512, 8])
def test_depths_equal_numpy_over_all_vectors(
    widest: int, tiny_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "WIDEST_FULL", widest)
    stats = SourceStatistics.collect(tiny_classifier.train(), batches())
    images = torch.cat([images for images, _ in batches()])
    tiny_classifier.eval()
    assert tuple(stats.depths) == NAMES
    for name, found in stats.depths.items():
        vectors = vectors_of(tiny_classifier.model.get_submodule(name), tiny_classifier, images)
        covariance = torch.from_numpy(np.cov(vectors.T, bias=True))
        if vectors.shape[1] > widest:
            assert found.covariance.family == "diagonal"
            covariance = torch.diag(covariance.diagonal())
        expected = (torch.from_numpy(vectors.mean(0)), covariance)
        for ours, theirs in zip((found.mean[0], found.covariance.dense()[0]), expected, strict=True):
            assert ours.dtype == torch.float32
            torch.testing.assert_close(ours.double(), theirs, rtol=1e-4, atol=1e-6)
    family = "full" if widest == 512 else "diagonal and full"
    assert stats.provenance()["depths"] == 3
    assert stats.provenance()["depth_family"] == family


def test_tokens_are_vectors_too() -> None:
    torch.manual_seed(0)
    classifier = Classifier(VisionTransformer(10, width=12, depth=2), mean=0, std=1).eval().double()
    stats = SourceStatistics.collect(classifier, batches(20, side=32))
    images = torch.cat([images for images, _ in batches(20, side=32)]).double()
    for name, found in stats.depths.items():
        vectors = vectors_of(classifier.model.get_submodule(name), classifier, images)
        assert len(vectors) == 20 * 65
        torch.testing.assert_close(found.covariance.dense()[0], torch.from_numpy(np.cov(vectors.T, bias=True)))
    assert tuple(stats.depths) == tuple(stats.floors)[:2] == ("blocks.0", "blocks.1")


def plain_divergence(mean_s: Tensor, cov_s: Tensor, mean_t: Tensor, cov_t: Tensor) -> float:
    """Symmetric KL by channel, with torch.distributions."""
    ridge = torch.eye(len(mean_s)) * cov_s.diagonal().max() / 30
    one = torch.distributions.MultivariateNormal(mean_s, cov_s + ridge)
    other = torch.distributions.MultivariateNormal(mean_t, cov_t + ridge)
    kl = torch.distributions.kl_divergence
    return float(kl(one, other) + kl(other, one)) / len(mean_s)


def test_floors_are_the_mean_divergence_of_windows(
    tiny_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "WINDOW", 40)
    windows: list[Tensor] = []
    given = depths.Reservoir.windows

    def recorded(self: depths.Reservoir) -> Iterator[Tensor]:
        windows.extend(given(self))
        return iter(windows)

    monkeypatch.setattr(depths.Reservoir, "windows", recorded)
    before = tiny_classifier.fingerprint()
    stats = SourceStatistics.collect(tiny_classifier, batches())
    assert tiny_classifier.fingerprint() == before
    assert [len(window) for window in windows] == [40, 40, 40]
    everything = torch.cat([images for images, _ in batches()])
    order = {image.numpy().tobytes(): number for number, image in enumerate(everything)}
    places = [order[image.numpy().tobytes()] for window in windows for image in window]
    assert sorted(places) == list(range(120))
    assert all(len({place // 12 for place in places[start : start + 40]}) > 5 for start in (0, 40, 80))  # all classes
    tiny_classifier.train()
    for name in NAMES:
        source = stats.depths[name]
        found = []
        for window in windows:
            vectors = torch.from_numpy(
                vectors_of(tiny_classifier.model.get_submodule(name), tiny_classifier, window)
            ).float()
            moments = vectors.mean(0), torch.cov(vectors.mT, correction=0)
            found.append(plain_divergence(source.mean[0], source.covariance.dense()[0], *moments))
        assert stats.floors[name] == pytest.approx(sum(found) / 3, rel=1e-3)


def test_small_windows_are_scaled_and_what_cannot_be_run_has_no_floor(
    tiny_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SourceStatistics.collect(tiny_classifier, batches())  # one window of 120 images
    monkeypatch.setattr(depths, "WINDOW", 120)
    unscaled = SourceStatistics.collect(tiny_classifier, batches())
    for name in NAMES:
        assert whole.floors[name] == pytest.approx(unscaled.floors[name] * 120 / 256)
    monkeypatch.setattr(depths, "PIXELS", 16 * 16)  # one image in a window, and one position before the norm
    narrow = Classifier(nn.Sequential(*_NARROW), mean=0, std=1).eval()
    stats = SourceStatistics.collect(narrow, batches())
    assert tuple(stats.depths) == ("0", "1")
    assert not stats.floors


_NARROW = (
    nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()),
    nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()),
    nn.AdaptiveAvgPool2d(1),
    nn.BatchNorm2d(4),
    nn.Flatten(),
    nn.Linear(4, 10),
)


def test_the_choice_of_images_is_even_and_does_not_depend_on_batches(
    tiny_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(depths, "WINDOW", 20)
    images = torch.arange(2000).reshape(-1, 1, 1, 1).expand(-1, 3, 2, 2) / 2000
    chosen = []
    for size in (7, 500):
        kept = depths.Reservoir(tiny_classifier, images[0])
        for batch in images.split(size):
            kept.add(batch)
        kept.add(torch.rand(5, 3, 4, 4))  # of another size
        chosen.append(torch.cat(list(kept.windows()))[:, 0, 0, 0])
    assert torch.equal(*chosen)
    assert len(chosen[0].unique()) == 160
    counts = torch.histc(chosen[0], 4, 0, 1)
    assert counts.min() > 25  # 40 expected, with a deviation of 5


def test_depths_survive_files_bundles_and_moves(tiny_classifier: Classifier, tmp_path: Path) -> None:
    stats = SourceStatistics.collect(tiny_classifier, batches())
    stats.save(tmp_path / "stats")
    save_bundle(tmp_path / "bundle", Bundle(tiny_classifier, ModelDescription("resnet8", 10), CrossEntropy(), stats))
    for loaded in (
        SourceStatistics.load(tmp_path / "stats", tiny_classifier),
        load_bundle(tmp_path / "bundle").statistics,
    ):
        assert loaded is not None
        assert loaded.fingerprint() == stats.fingerprint()
        assert loaded.floors == stats.floors
        assert tuple(loaded.depths) == NAMES
        for name, depth in loaded.depths.items():
            assert torch.equal(depth.mean, stats.depths[name].mean)
            assert torch.equal(depth.covariance.dense(), stats.depths[name].covariance.dense())
    moved = stats.to(torch.device("meta"))
    assert all(depth.mean.is_meta and depth.covariance.dense().is_meta for depth in moved.depths.values())
    assert moved.floors == stats.floors
    others = (
        replace(stats, floors={**stats.floors, "layer1.0": 1.0}),
        replace(stats, depths={f"{name}.x": depth for name, depth in stats.depths.items()}),
        replace(stats, depths={}, floors={}),
    )
    assert len({stats.fingerprint(), *(other.fingerprint() for other in others)}) == 4
    with pytest.raises(ValueError, match=r"depths that the classifier does not have: layer1\.0\.x"):
        others[1].check(tiny_classifier)
    assert not SourceStatistics.infer(tiny_classifier).depths
    assert "depths" not in SourceStatistics.infer(tiny_classifier).provenance()


def test_statistics_without_depths_are_written_and_hashed_as_before_there_were_any(
    tiny_classifier: Classifier, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tiny_classifier.branch = ContrastiveBranch(tiny_classifier.feature_dim)
    stats = replace(SourceStatistics.collect(tiny_classifier, batches()), depths={}, floors={})
    stats.save(tmp_path / "stats")
    with safe_open(tmp_path / "stats", "pt") as file:
        metadata = file.metadata()
        assert set(metadata) == {"format", "families", "origin"}
        assert json.loads(metadata["families"]) == {"classes": "full", "overall": "full", "projected": "full"}
        digest = hashlib.sha256(metadata["origin"].encode())
        for part in ("classes", "overall", "projected"):
            for tensor in ("mean", "matrix"):
                digest.update(file.get_tensor(f"{part}.{tensor}").numpy().tobytes())
    assert SourceStatistics.load(tmp_path / "stats").fingerprint() == stats.fingerprint() == digest.hexdigest()[:32]


def test_a_dead_depth_is_left_out(tiny_classifier: Classifier) -> None:
    with torch.no_grad():
        norm = tiny_classifier.model.get_submodule("layer3.0.bn2")
        shortcut = tiny_classifier.model.get_submodule("layer3.0.downsample.1")
        for layer in (norm, shortcut):
            assert isinstance(layer, nn.BatchNorm2d)
            layer.weight.zero_()
            layer.bias.fill_(-1.0)
    stats = SourceStatistics.collect(tiny_classifier, batches())
    assert tuple(stats.depths) == tuple(stats.floors)[:2] == NAMES[:2]


def test_networks_without_maps_have_no_depths() -> None:
    classifier = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(768, 8), nn.ReLU(), nn.Linear(8, 10)), head="3", mean=0, std=1
    )
    stats = SourceStatistics.collect(classifier, batches())
    assert not stats.depths
    assert tuple(stats.floors) == ("classes", "overall")


def test_half_precision_and_autocast_collect_the_same_roughly() -> None:
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 10, width=4), mean=0, std=1).eval()
    exact = SourceStatistics.collect(classifier, batches())
    for other in (classifier.copy().to(torch.bfloat16), classifier.tuned(autocast="bfloat16")):
        found = SourceStatistics.collect(other, batches())
        for name, depth in found.depths.items():
            assert depth.mean.dtype == torch.float32
            assert depths.depth_divergence(exact.depths[name], depth) < 1e-3


GOOD = {"depths.a.b.mean": torch.zeros(1, 2), "depths.a.b.matrix": torch.eye(2)[None].clone()}


@pytest.mark.parametrize(
    ("families", "tensors", "floors"),
    [
        ({}, {"depths.a.b.mean": torch.full((1, 2), torch.nan)}, "{}"),
        ({}, {"depths.a.b.matrix": torch.full((1, 2, 2), torch.inf)}, "{}"),
        ({}, {"depths.a.b.matrix": torch.zeros(1, 2, 3)}, "{}"),
        ({}, {"depths.a.b.mean": torch.zeros(1, 3)}, "{}"),
        ({}, {"depths.a.b.mean": torch.zeros(2, 2), "depths.a.b.matrix": torch.zeros(2, 2, 2)}, "{}"),
        ({}, {"depths.a.b.c.mean": torch.zeros(1, 2)}, "{}"),
        ({"depths.a.b": "isotropic"}, {}, "{}"),
        ({"depths.c": "full"}, {}, "{}"),
        ({"depths": "full"}, {"depths.mean": torch.zeros(1, 2), "depths.matrix": torch.eye(2)[None].clone()}, "{}"),
        ({"heights.a": "full"}, {"heights.a.mean": torch.zeros(1, 1), "heights.a.matrix": torch.ones(1, 1, 1)}, "{}"),
        ({}, {}, '{"c": 1.0}'),
        ({}, {}, '{"a.b": -1.0}'),
        ({}, {}, '{"a.b": NaN}'),
        ({}, {}, '{"a.b": Infinity}'),
        ({}, {}, '{"a.b": "1"}'),
        ({}, {}, "[1.0]"),
        ({}, {}, "{"),
    ],
)
def test_forged_depths_are_refused_by_name(
    families: dict[str, str], tensors: dict[str, Tensor], floors: str, tmp_path: Path
) -> None:
    whole: dict[str, Tensor] = {**GOOD}
    for part, count in (("classes", 2), ("overall", 1)):
        whole |= {f"{part}.mean": torch.zeros(count, 3), f"{part}.matrix": torch.eye(3).repeat(count, 1, 1)}
    origin = {"how": "collected", "fingerprint": "0", "samples": 4, "counts": [2, 2], "grouped_by": "label"}
    known = {"classes": "full", "overall": "full", "depths.a.b": "full"}
    metadata = {"format": "ttac.statistics/1", "origin": json.dumps(origin)}
    save_file(whole, tmp_path / "good", {**metadata, "families": json.dumps(known), "floors": '{"a.b": 0.5}'})
    good = SourceStatistics.load(tmp_path / "good")
    assert (list(good.depths), good.floors) == (["a.b"], {"a.b": 0.5})
    metadata |= {"families": json.dumps({**known, **families}), "floors": floors}
    save_file({**whole, **tensors}, tmp_path / "bad", metadata)
    with pytest.raises(ValueError, match="bad is not a readable statistics file"):
        SourceStatistics.load(tmp_path / "bad")
