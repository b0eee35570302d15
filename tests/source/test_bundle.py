"""Bundles come back as they were, and a damaged, mixed-up or hostile one is refused with the reason."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from ttac import SourceStatistics
from ttac.model.architectures import new_network
from ttac.model.branches import ContrastiveBranch
from ttac.model.weights import ModelDescription, classifier_of
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.loading import load_model
from ttac.source.objectives import OBJECTIVES, Objective, make_objective


def made(objective: Objective, *, seed: int = 0, statistics: bool = False) -> Bundle:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = new_network("resnet8", 3, options={"width": 4})
        description = ModelDescription(
            "resnet8", 3, mean=(0.1, 0.2, 0.3), std=(0.3,) * 3, size=(16, 16), classes=("a", "b", "ß"),
            arch_options={"width": 4},
        )  # fmt: skip
        model = classifier_of(network, description)
        model.classifier.branch = objective.new_branch(model.classifier.feature_dim)
    images, labels = torch.rand(12, 3, 16, 16), torch.arange(12) % 3
    found = SourceStatistics.collect(model.classifier, [(images, labels)]) if statistics else None
    return Bundle(model.classifier, model.description, objective, found, {"validation_error": 1.5})


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("statistics", [True, False])
def test_a_bundle_comes_back_as_it_was(name: str, statistics: bool, tmp_path: Path) -> None:
    bundle = made(make_objective(name), statistics=statistics)
    save_bundle(tmp_path / "b", bundle)
    again = load_bundle(tmp_path / "b")
    assert again.classifier.fingerprint() == bundle.classifier.fingerprint()
    assert (again.description, again.objective) == (bundle.description, bundle.objective)
    assert again.training == {"validation_error": 1.5}
    first, second = (item.classifier.branch for item in (bundle, again))
    assert (first is None) == (second is None) == (bundle.objective.branch is None)
    if first is not None and second is not None:
        assert second.kind == bundle.objective.branch
        assert not second.training
        for key, value in first.state_dict().items():
            assert torch.equal(value, second.state_dict()[key]), key
    if bundle.statistics is None:
        assert again.statistics is None
    else:
        assert again.statistics is not None
        assert again.statistics.fingerprint() == bundle.statistics.fingerprint()
    loaded = load_model(str(tmp_path / "b"))
    assert isinstance(loaded, Bundle)
    assert loaded.objective == bundle.objective


def test_a_description_in_round_numbers_is_stored_as_the_classifier_has_it(tmp_path: Path) -> None:
    bundle = made(make_objective("ce"))
    by_hand = dataclasses.replace(bundle.description, mean=(0.1, 0.2, 0.3), head=None)  # 0.1 is no float32
    save_bundle(tmp_path / "b", dataclasses.replace(bundle, description=by_hand))
    assert load_bundle(tmp_path / "b").description == bundle.description


def test_the_same_bundle_is_written_as_the_same_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        save_bundle(tmp_path / folder, made(make_objective("ce+rotation")))
    for path in sorted((tmp_path / "a").iterdir()):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name


def test_a_bundle_can_be_replaced_by_one_with_fewer_parts(tmp_path: Path) -> None:
    save_bundle(tmp_path, made(make_objective("ce+rotation"), statistics=True))
    save_bundle(tmp_path, made(make_objective("poly", epsilon=2.0), seed=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle.json", "model.safetensors"]
    assert load_bundle(tmp_path).objective == make_objective("poly", epsilon=2.0)


def test_parts_that_do_not_belong_together_are_not_written(tmp_path: Path) -> None:
    bundle, other = made(make_objective("ce"), statistics=True), made(make_objective("ce+rotation"), seed=1)
    with pytest.raises(ValueError, match="goes with the branch None, not rotation"):
        save_bundle(tmp_path, Bundle(other.classifier, other.description, bundle.objective))
    with pytest.raises(ValueError, match="the statistics belong to the model"):
        save_bundle(tmp_path, Bundle(other.classifier, other.description, other.objective, bundle.statistics))
    assert list(tmp_path.iterdir()) == []


def edit(**change: Any) -> Callable[[Path, Path], None]:
    def apply(bundle: Path, _other: Path) -> None:
        content = json.loads((bundle / "bundle.json").read_text())
        for key, value in change.items():
            content[key] = {**content[key], **value} if isinstance(value, dict) else value
        (bundle / "bundle.json").write_text(json.dumps(content))

    return apply


def take_from_another(name: str) -> Callable[[Path, Path], None]:
    return lambda bundle, other: shutil.copy(other / name, bundle / name) and None


def cut_short(name: str, share: float) -> Callable[[Path, Path], None]:
    def apply(bundle: Path, _other: Path) -> None:
        whole = (bundle / name).read_bytes()
        (bundle / name).write_bytes(whole[: int(share * len(whole))])

    return apply


def link_out(name: str) -> Callable[[Path, Path], None]:
    def apply(bundle: Path, other: Path) -> None:
        shutil.move(bundle / name, other / "moved")
        (bundle / name).symlink_to(other / "moved")

    return apply


def forge_branch(**tensors: torch.Tensor) -> Callable[[Path, Path], None]:
    def apply(bundle: Path, _other: Path) -> None:
        fingerprint = json.loads((bundle / "bundle.json").read_text())["fingerprint"]
        note = json.dumps({"kind": "rotation", "fingerprint": fingerprint})
        named = {name.replace("_", "."): tensor for name, tensor in tensors.items()}
        save_file(named, bundle / "branch.safetensors", {"ttac": note})

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (edit(format="ttac.bundle/9"), "is of the format 'ttac.bundle/9', expected 'ttac.bundle/1'"),
        (edit(fingerprint="0" * 32), "is not the model that bundle.json describes"),
        (edit(model={"classes": ["x", "y", "z"]}), "is not the model that bundle.json describes"),
        (edit(model={"mean": [float("nan")] * 3}), "mean must be a finite number"),
        (edit(model={"arch": "os:system"}), "is not the model that bundle.json describes"),
        (edit(model={"num_classes": 0}), "num_classes"),
        (edit(objective={"name": "hinge"}), "unknown objective"),
        (edit(objective={"branch_weight": "x"}), "branch_weight"),
        (edit(objective={"branch_weight": 10**400}), "bundle.json is damaged"),
        (edit(model={"crop_pct": 10**400}), "bundle.json is damaged"),
        (edit(objective=[1]), "bundle.json is damaged"),
        (edit(training=3), "bundle.json is damaged"),
        (cut_short("bundle.json", 0.5), "bundle.json is damaged"),
        (cut_short("model.safetensors", 0.9), "not a readable safetensors file"),
        (cut_short("model.safetensors", 0.0), "not a readable safetensors file"),
        (cut_short("branch.safetensors", 0.9), "not a readable safetensors file"),
        (cut_short("statistics.safetensors", 0.9), "not a readable statistics file"),
        (take_from_another("model.safetensors"), "is not the model that bundle.json describes"),
        (take_from_another("branch.safetensors"), "is not the rotation branch of this model"),
        (take_from_another("statistics.safetensors"), "the statistics belong to the model"),
        (link_out("model.safetensors"), "is a link that leads out of the bundle"),
        (link_out("bundle.json"), "is a link that leads out of the bundle"),
        (link_out("branch.safetensors"), "is a link that leads out of the bundle"),
        (link_out("statistics.safetensors"), "is a link that leads out of the bundle"),
        (lambda bundle, _: (bundle / "branch.safetensors").unlink(), "is incomplete: it has no branch.safetensors"),
        (lambda bundle, _: (bundle / "model.safetensors").unlink(), "is incomplete: it has no model.safetensors"),
        (lambda bundle, _: (bundle / "bundle.json").write_text("[" * 10**5), "bundle.json is damaged"),
        (lambda bundle, _: (bundle / "bundle.json").write_text("[]"), "is of the format None"),
        (forge_branch(turns_weight=torch.zeros(4, 16)), r"does not fit a rotation branch on 16 .* missing"),
        (forge_branch(turns_weight=torch.zeros(4, 16), turns_bias=torch.full((4,), torch.nan)), "NaN or infinity in"),
    ],
)
def test_a_spoilt_bundle_is_refused(spoil: Callable[[Path, Path], None], message: str, tmp_path: Path) -> None:
    bundle, other = tmp_path / "bundle", tmp_path / "other"
    save_bundle(bundle, made(make_objective("ce+rotation"), statistics=True))
    save_bundle(other, made(make_objective("ce+rotation"), seed=1, statistics=True))
    spoil(bundle, other)
    with pytest.raises(ValueError, match=message):
        load_bundle(bundle)


def test_an_interrupted_bundle_is_no_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_bundle(tmp_path, made(make_objective("ce")))

    def dies(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("ttac.source.bundle.write_json", dies)
    with pytest.raises(KeyboardInterrupt):
        save_bundle(tmp_path, made(make_objective("ce"), seed=1))
    with pytest.raises(FileNotFoundError, match=r"no bundle in .*: it has no bundle.json"):
        load_bundle(tmp_path)


def test_a_bundle_is_taken_as_it_is(tmp_path: Path) -> None:
    save_bundle(tmp_path / "b", made(make_objective("ce")))
    with pytest.raises(ValueError, match="is a bundle, which says these itself: leave --mean, --std out"):
        load_model(str(tmp_path / "b"), mean=[0.5], std=[0.5])
    with pytest.raises(ValueError, match="is of the network resnet8, not resnet14: leave --arch out"):
        load_model(str(tmp_path / "b"), arch="resnet14")
    with pytest.raises(FileNotFoundError, match="no bundle in"):
        load_model(str(tmp_path))


def test_a_forged_number_of_classes_is_refused_before_memory_is_asked_for(tmp_path: Path) -> None:
    text = json.dumps({"arch": "resnet8", "num_classes": 10**12})
    save_file(new_network("resnet8", 3).state_dict(), tmp_path / "m.safetensors", {"ttac": text})
    with pytest.raises(ValueError, match="are of fewer than 1000000000000 classes"):
        load_model(str(tmp_path / "m.safetensors"))


def test_a_branch_that_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    bundle = made(make_objective("ce+contrastive"))
    state = torch.get_rng_state()
    bundle.classifier.branch = ContrastiveBranch(bundle.classifier.feature_dim, projection_dim=64)
    torch.set_rng_state(state)
    with pytest.raises(
        ValueError, match=r"not one of the objective ce\+contrastive .*\(projection.weight \(64, 16\) for"
    ):
        save_bundle(tmp_path / "b", bundle)
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)
