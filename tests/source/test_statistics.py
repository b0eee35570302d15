"""Source statistics: collected against torch.cov, files against damage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

from ttac import Classifier, SourceStatistics
from ttac.gaussian import FAMILIES, LowRank, RunningGaussians
from ttac.gaussian.running import Blend
from ttac.model.branches import ContrastiveBranch, RotationBranch, fingerprint
from ttac.model.networks import ResNet
from ttac.source import buffered


def images_and_labels(count: int = 120, classes: int = 10) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.rand(count, 3, 16, 16, generator=generator), torch.arange(count) % classes


def loader(size: int = 32) -> list[tuple[torch.Tensor, torch.Tensor]]:
    images, labels = images_and_labels()
    return list(zip(images.split(size), labels.split(size), strict=True))


@pytest.mark.parametrize("portion", [1, 10_000, buffered.PORTION])
def test_collected_statistics_equal_torch_cov(
    portion: int, tiny_classifier: Classifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered, "PORTION", portion)  # each batch, two at a time, all at once
    classifier = tiny_classifier.double()
    images, labels = images_and_labels()
    stats = SourceStatistics.collect(classifier, loader())
    with torch.no_grad():
        features = classifier.features(images.double())
    for k in range(10):
        own = features[labels == k]
        torch.testing.assert_close(stats.classes.mean[k], own.mean(0))
        expected = torch.cov(own.mT, correction=0)
        torch.testing.assert_close(stats.classes.covariance.dense()[k], expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(stats.overall.mean[0], features.mean(0))
    expected = torch.cov(features.mT, correction=0)
    torch.testing.assert_close(stats.overall.covariance.dense()[0], expected, atol=1e-10, rtol=0)
    assert stats.origin.counts == (12,) * 10
    assert stats.origin.samples == 120
    assert not stats.source_free


@pytest.mark.parametrize("order", ["sorted", "shuffled"])
@pytest.mark.parametrize("size", [1, 50, 600])
def test_portions_bound_what_low_rank_gaussians_decompose(
    size: int, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffered, "SAMPLES", 16)
    widths = []
    compacted = LowRank.compacted

    def recorded(self: LowRank, rank: int) -> LowRank:
        widths.append(self.factor.shape[2])
        return compacted(self, rank)

    monkeypatch.setattr(LowRank, "compacted", recorded)
    torch.manual_seed(0)
    labels = torch.arange(600) // 200 if order == "sorted" else torch.randperm(600) % 3
    features = torch.randn(600, 5, dtype=torch.float64) * (1 + labels[:, None])
    running = RunningGaussians.empty(3, 5, family="low-rank", rank=5, dtype=torch.float64)
    waiting = buffered.BufferedGaussians(running)
    for some, own in zip(features.split(size), labels.split(size), strict=True):
        waiting.add(some, own)
    found = waiting.finish()
    assert max(widths) <= 5 + 16
    assert sum(width > 5 for width in widths) <= 2 * 600 / 16  # an update for each batch of one would be 600
    for k in range(3):
        own = features[labels == k]
        torch.testing.assert_close(found.gaussians.mean[k], own.mean(0))
        torch.testing.assert_close(found.gaussians.covariance.dense()[k], torch.cov(own.mT, correction=0))


def test_full_gaussians_take_portions_by_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffered, "PORTION", 64 * 4 * 100)
    sizes = []
    blend = RunningGaussians.blend

    def recorded(self: RunningGaussians, features: torch.Tensor, groups: torch.Tensor) -> Blend:
        sizes.append(len(features))
        return blend(self, features, groups)

    monkeypatch.setattr(RunningGaussians, "blend", recorded)
    waiting = buffered.BufferedGaussians(RunningGaussians.empty(1, 4, family="full", dtype=torch.float64))
    for features in torch.randn(2000, 4, dtype=torch.float64):
        waiting.add(features[None], torch.zeros(1).long())
    waiting.finish()
    assert sizes == [800, 800, 400]


def test_collecting_leaves_the_classifier_alone(tiny_classifier: Classifier) -> None:
    tiny_classifier.train()
    before = tiny_classifier.fingerprint()
    SourceStatistics.collect(tiny_classifier, loader())
    assert tiny_classifier.fingerprint() == before
    assert tiny_classifier.training


def test_grouping_by_prediction(tiny_classifier: Classifier) -> None:
    images, _ = images_and_labels()
    with torch.no_grad():
        predictions = tiny_classifier(images).argmax(1)
    with pytest.raises(ValueError, match=r"no source sample of class .* \(grouped by prediction\)"):
        SourceStatistics.collect(tiny_classifier, [images])
    # Give the head a bias that makes every class win somewhere: predictions are then a grouping of their own.
    assert len(predictions.unique()) < 10
    two = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(3 * 256, 2)), mean=0, std=1)
    with torch.no_grad():
        two.head.bias.zero_()
        two.head.weight.copy_(two.head.weight - two.head.weight.mean(1, keepdim=True))
        predictions = two(images).argmax(1)
    stats = SourceStatistics.collect(two, [images], family="diagonal")
    assert stats.origin.grouped_by == "prediction"
    assert stats.origin.counts == tuple(torch.bincount(predictions, minlength=2).tolist())


@pytest.mark.parametrize("family", FAMILIES)
def test_families_can_be_chosen_and_survive_a_file(family: str, tiny_classifier: Classifier, tmp_path: Path) -> None:
    stats = SourceStatistics.collect(tiny_classifier, loader(), family=family, rank=3)
    assert stats.classes.covariance.family == family
    stats.save(tmp_path / "stats.safetensors")
    loaded = SourceStatistics.load(tmp_path / "stats.safetensors", tiny_classifier)
    assert loaded.origin == stats.origin
    for ours, theirs in ((stats.classes, loaded.classes), (stats.overall, loaded.overall)):
        assert torch.equal(ours.mean, theirs.mean)
        assert torch.equal(ours.covariance.dense(), theirs.covariance.dense())
    assert [path.name for path in tmp_path.iterdir()] == ["stats.safetensors"]


def test_bad_loaders_are_refused(tiny_classifier: Classifier) -> None:
    images, labels = images_and_labels()
    with pytest.raises(ValueError, match=r"no source sample of class 9"):
        SourceStatistics.collect(tiny_classifier, [(images, labels.clamp_max(8))])
    with pytest.raises(ValueError, match="labels must be in"):
        SourceStatistics.collect(tiny_classifier, [(images, labels + 1)])
    with pytest.raises(ValueError, match="needs a loader that yields"):
        SourceStatistics.collect(tiny_classifier, [images], group_by="label")
    with pytest.raises(ValueError, match="family"):
        SourceStatistics.collect(tiny_classifier, loader(), family="spherical")
    with pytest.raises(TypeError, match="the loader yields dict"):
        SourceStatistics.collect(tiny_classifier, [{"image": images}])


def test_inference_knows_signed_features(tiny_classifier: Classifier) -> None:
    assert SourceStatistics.infer(tiny_classifier).classes.mean.min() >= 0  # ends in a ReLU
    signed = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 6), nn.LayerNorm(6), nn.Linear(6, 4)),
        head="3",
        mean=0,
        std=1,
    )
    assert SourceStatistics.infer(signed).classes.mean.min() < 0


def test_rescaled_weights_have_one_norm(tiny_classifier: Classifier) -> None:
    stats = SourceStatistics.rescale_weights(tiny_classifier)
    weight = tiny_classifier.head.weight
    assert F.cosine_similarity(stats.classes.mean, weight).min() > 1 - 1e-6
    torch.testing.assert_close(stats.classes.mean.norm(dim=1), weight.norm(dim=1).mean().expand(10))
    assert stats.origin.how == "rescaled"
    assert stats.source_free


def test_statistics_of_another_model_are_refused_with_both_fingerprints(
    tiny_classifier: Classifier, tmp_path: Path
) -> None:
    path = tmp_path / "stats.safetensors"
    SourceStatistics.infer(tiny_classifier).save(path)
    torch.manual_seed(7)
    other = Classifier(ResNet(8, 10, width=4), mean=0, std=1)
    with pytest.raises(ValueError, match="belong to the model") as caught:
        SourceStatistics.load(path, other)
    assert tiny_classifier.fingerprint() in str(caught.value)
    assert other.fingerprint() in str(caught.value)
    with pytest.raises(ValueError, match="10 classes and 16 features; the classifier has 7 and 16"):
        SourceStatistics.load(path, Classifier(ResNet(8, 7, width=4), mean=0, std=1))


def test_damaged_files_are_refused_by_name(tiny_classifier: Classifier, tmp_path: Path) -> None:
    good = tmp_path / "good.safetensors"
    SourceStatistics.infer(tiny_classifier).save(good)
    content = good.read_bytes()
    flipped = bytearray(content)
    flipped[-4:] = b"\xff\xff\xff\x7f"  # the last number becomes NaN
    for number, damage in enumerate((b"", b"hello", content[: len(content) // 2], content[:-5], bytes(flipped))):
        bad = tmp_path / f"bad{number}.safetensors"
        bad.write_bytes(damage)
        with pytest.raises(ValueError, match=f"bad{number}.safetensors is not a readable statistics file"):
            SourceStatistics.load(bad)

    save_file({"classes.mean": torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="its format is None"):
        SourceStatistics.load(tmp_path / "other.safetensors")
    with pytest.raises(FileNotFoundError, match="no statistics file"):
        SourceStatistics.load(tmp_path / "missing.safetensors")


def branched(classifier: Classifier, branch: type[ContrastiveBranch] | type[RotationBranch]) -> Classifier:
    torch.manual_seed(0)
    classifier.branch = branch(classifier.feature_dim)
    return classifier


def test_projections_of_a_contrastive_branch_are_collected_and_saved(
    tiny_classifier: Classifier, tmp_path: Path
) -> None:
    classifier = branched(tiny_classifier, ContrastiveBranch).double()
    images, _ = images_and_labels()
    stats = SourceStatistics.collect(classifier, loader())
    assert stats.projected is not None
    assert classifier.branch is not None
    with torch.no_grad():
        projections = classifier.branch(classifier.features(images.double()))
    torch.testing.assert_close(stats.projected.mean[0], projections.mean(0))
    expected = torch.cov(projections.mT, correction=0)
    torch.testing.assert_close(stats.projected.covariance.dense()[0], expected, atol=1e-10, rtol=0)
    stats.save(tmp_path / "stats.safetensors")
    loaded = SourceStatistics.load(tmp_path / "stats.safetensors", classifier)
    assert loaded.projected is not None
    assert torch.equal(loaded.projected.mean, stats.projected.mean)
    assert loaded.fingerprint() == stats.fingerprint()
    moved = stats.to(torch.device("meta")).projected
    assert moved is not None
    assert moved.mean.is_meta


def test_statistics_without_projections_stay_as_they_were(tiny_classifier: Classifier, tmp_path: Path) -> None:
    plain = SourceStatistics.collect(tiny_classifier, loader())
    plain.save(tmp_path / "stats.safetensors")
    loaded = SourceStatistics.load(tmp_path / "stats.safetensors")
    assert plain.projected is loaded.projected is None
    assert loaded.fingerprint() == plain.fingerprint()
    with_projections = SourceStatistics.collect(branched(tiny_classifier, ContrastiveBranch), loader())
    assert with_projections.fingerprint() != plain.fingerprint()
    assert list(with_projections.parts)[:3] == ["classes", "overall", "projected"]
    rotation = SourceStatistics.collect(branched(tiny_classifier, RotationBranch), loader())
    assert rotation.projected is None
    assert rotation.fingerprint() == plain.fingerprint()
    assert SourceStatistics.infer(tiny_classifier).projected is None


def write_statistics(path: Path, families: dict[str, str], origin: Any, **tensors: torch.Tensor) -> Path:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    metadata = {"format": "ttac.statistics/1", "families": json.dumps(families), "origin": json.dumps(origin)}
    save_file(named, path, metadata)
    return path


GOOD_ORIGIN = {"how": "collected", "fingerprint": "0", "samples": 4, "counts": [2, 2], "grouped_by": "label"}
GOOD_PARTS = {
    "classes__mean": torch.zeros(2, 3),
    "classes__matrix": torch.eye(3).repeat(2, 1, 1),
    "overall__mean": torch.zeros(1, 3),
    "overall__matrix": torch.eye(3)[None].clone(),
}


@pytest.mark.parametrize(
    ("families", "origin", "parts"),
    [
        ({}, {}, {"classes__matrix": torch.ones(3)}),  # IndexError
        ({}, {}, {"classes__matrix": torch.zeros(2, 3, 5)}),
        ({}, {}, {"classes__mean": torch.zeros(3)}),
        ({}, {}, {"classes__mean": torch.zeros(2, 3, dtype=torch.int32)}),
        ({}, {}, {"overall__mean": torch.zeros(2, 3), "overall__matrix": torch.zeros(2, 3, 3)}),
        ({}, {}, {"overall__mean": torch.zeros(1, 2), "overall__matrix": torch.zeros(1, 2, 2)}),
        ({}, {}, {"classes__variance": torch.zeros(2, 3)}),
        ({"classes": "isotropic"}, {}, {}),
        ({"classes": "round"}, {}, {}),
        ({"projected": "full"}, {}, {}),
        ({}, {"how": "guessed"}, {}),
        ({}, {"how": None}, {}),
        ({}, {"samples": "none"}, {}),
        ({}, {"counts": 3}, {}),
        ({}, {"colour": 3}, {}),
        ({}, {"branch": 3}, {}),
    ],
)
def test_files_that_make_no_sense_are_refused_by_name(
    families: dict[str, str], origin: dict[str, Any], parts: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    whole = {"classes": "full", "overall": "full"}
    good = write_statistics(tmp_path / "good", whole, GOOD_ORIGIN, **GOOD_PARTS)
    assert SourceStatistics.load(good).origin.branch is None  # as files were before there was the field
    bad = write_statistics(
        tmp_path / "bad", {**whole, **families}, {**GOOD_ORIGIN, **origin}, **{**GOOD_PARTS, **parts}
    )
    with pytest.raises(ValueError, match="bad is not a readable statistics file"):
        SourceStatistics.load(bad)


def test_a_file_with_isotropic_numbers_out_of_range_is_refused(tmp_path: Path) -> None:
    parts = {**GOOD_PARTS, "classes__noise": torch.ones(2), "classes__dim": torch.tensor([3.0, 1e30])}
    del parts["classes__matrix"]
    for dim in (torch.tensor([3, 3]), torch.tensor(1e30), torch.tensor(float("inf")), torch.tensor(2**60)):
        parts["classes__dim"] = dim
        families = {"classes": "isotropic", "overall": "full"}
        bad = write_statistics(tmp_path / "bad", families, GOOD_ORIGIN, **parts)
        with pytest.raises(ValueError, match="bad is not a readable statistics file"):
            SourceStatistics.load(bad)


def test_only_statistics_without_any_source_sample_are_source_free(tiny_classifier: Classifier) -> None:
    stats = SourceStatistics.rescale_weights(tiny_classifier)
    assert stats.source_free
    assert not replace(stats, origin=replace(stats.origin, samples=5)).source_free
    assert not replace(stats, origin=replace(stats.origin, how="collected")).source_free
    with pytest.raises(ValueError, match="'guessed'"):
        replace(stats.origin, how="guessed")  # type: ignore[arg-type]


def test_a_head_with_a_row_of_zeros_cannot_be_rescaled(tiny_classifier: Classifier) -> None:
    with torch.no_grad():
        tiny_classifier.head.weight[[2, 7]] = 0
    with pytest.raises(ValueError, match=r"the head's weights of class 2, 7 are all zero.*infer or collect"):
        SourceStatistics.rescale_weights(tiny_classifier)
    assert SourceStatistics.infer(tiny_classifier).classes.mean.isfinite().all()


def test_projections_of_another_branch_are_refused(tiny_classifier: Classifier, tmp_path: Path) -> None:
    classifier = branched(tiny_classifier, ContrastiveBranch)
    assert classifier.branch is not None
    stats = SourceStatistics.collect(classifier, loader())
    assert stats.origin.branch == fingerprint(classifier.branch)
    stats.save(tmp_path / "stats")
    assert SourceStatistics.load(tmp_path / "stats", classifier).origin == stats.origin
    other = classifier.copy()
    other.branch = ContrastiveBranch(classifier.feature_dim)
    with pytest.raises(ValueError, match=r"projections of the branch .*: collect them again") as caught:
        SourceStatistics.load(tmp_path / "stats", other)
    for branch in (classifier.branch, other.branch):
        assert fingerprint(branch) in str(caught.value)
    other.branch = None
    stats.check(other)  # which never looks at the projections
    old = replace(stats, origin=replace(stats.origin, branch=None))
    other.branch = ContrastiveBranch(classifier.feature_dim)
    old.check(other)  # which cannot tell
    assert SourceStatistics.infer(classifier).origin.branch is None
