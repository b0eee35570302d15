"""A trained source model as one folder: weights, auxiliary branch, what it was trained on and for, statistics."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ttac.common.environment import environment
from ttac.common.files import write_json
from ttac.model.branches import Branch
from ttac.model.classifier import Classifier
from ttac.model.tensors import check_finite, read_tensors, write_tensors
from ttac.model.weights import (
    METADATA_KEY,
    LoadedModel,
    ModelDescription,
    classifier_of,
    misfit,
    read_weights,
    save_model,
)
from ttac.source.knowledge import STORED, Knowledge, StoredKnowledge
from ttac.source.objectives import Objective, make_objective
from ttac.source.statistics import SourceStatistics

FORMAT = "ttac.bundle/1"
DESCRIPTION = "bundle.json"
WEIGHTS, BRANCH, STATISTICS = (f"{part}.safetensors" for part in ("model", "branch", "statistics"))
LARGEST_DESCRIPTION = 2**24  # bytes; a forged one must not fill the memory


@dataclass(frozen=True)
class Bundle(LoadedModel):
    """A classifier, with its branch, and all that is known of how it was trained."""

    objective: Objective
    statistics: SourceStatistics | None = None
    training: Mapping[str, Any] = field(default_factory=dict)  # settings, history and validation error, as plain values
    stored: tuple[StoredKnowledge, ...] = ()  # whatever else is kept of the source

    @property
    def knowledge(self) -> tuple[Knowledge, ...]:
        """All that is known of the source beside weights and branch, which are the classifier's."""
        statistics = () if self.statistics is None else (self.statistics,)
        return (*statistics, *self.stored, self.objective.training_loss())


def save_bundle(folder: Path | str, bundle: Bundle) -> None:
    """Write a bundle; `bundle.json` comes last, so its being there means that all is."""
    folder = Path(folder)
    classifier = bundle.classifier
    _check_branch(classifier, bundle.objective)
    for one in bundle.knowledge:
        one.check(classifier)
    fingerprint, description = classifier.fingerprint(), bundle.description.of(classifier)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DESCRIPTION).unlink(missing_ok=True)
    save_model(folder / WEIGHTS, classifier.model, description)
    (folder / BRANCH).unlink(missing_ok=True)
    if classifier.branch is not None:
        note = _branch_note(classifier.branch, fingerprint)
        write_tensors(folder / BRANCH, classifier.branch.state_dict(), {METADATA_KEY: note})
    kept = {one.kind: one for one in bundle.knowledge if isinstance(one, StoredKnowledge)}
    for kind in STORED:
        (folder / knowledge_file(kind)).unlink(missing_ok=True)
    for kind, one in kept.items():
        one.save(folder / knowledge_file(kind))
    versions = environment()
    content = {
        "format": FORMAT,
        "fingerprint": fingerprint,
        "model": dataclasses.asdict(description),
        "objective": bundle.objective.as_dict(),
        "branch": bundle.objective.branch,
        "training": dict(bundle.training),
        "packages": {name: versions[name] for name in ("ttac", "python", "torch", "numpy")},
    }
    write_json(folder / DESCRIPTION, content)


def load_bundle(folder: Path | str, *, arch: str | None = None, device: str = "cpu") -> Bundle:
    """Read a folder that `save_bundle` wrote; raise an error that says what is wrong with any other.

    `arch` is only to say that a network "package.module:callable" is trusted, as this imports code.
    """
    folder = Path(folder)
    content = read_description(folder)
    try:
        objective = make_objective(**content["objective"])
        described = ModelDescription.parse(json.dumps(content["model"]))
        training, fingerprint = dict(content["training"]), str(content["fingerprint"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / DESCRIPTION} is damaged: {error!r}") from error
    if arch is not None and arch != described.arch:
        raise ValueError(f"{folder} is of the network {described.arch}, not {arch}: leave --arch out")
    loaded = classifier_of(*read_weights(_inside(folder, WEIGHTS), arch), device=device)
    classifier = loaded.classifier
    if loaded.description != described or classifier.fingerprint() != fingerprint:
        raise ValueError(
            f"{folder}: {WEIGHTS} is not the model that {DESCRIPTION} describes "
            f"({classifier.fingerprint()}, expected {fingerprint}): copy the whole bundle again"
        )
    if objective.branch is not None:
        classifier.branch = _read_branch(_inside(folder, BRANCH), objective, classifier, fingerprint)
    found = {
        kind: known.load(_inside(folder, knowledge_file(kind)), classifier)
        for kind, known in STORED.items()
        if (folder / knowledge_file(kind)).exists()
    }
    statistics = found.pop(SourceStatistics.kind, None)
    return Bundle(classifier, described, objective, statistics, training, tuple(found.values()))


def knowledge_file(kind: str) -> str:
    """Name the file of a bundle that keeps a kind of knowledge.

    >>> knowledge_file("statistics")
    'statistics.safetensors'
    """
    return f"{kind.replace(' ', '-')}.safetensors"


def read_description(folder: Path) -> dict[str, Any]:
    """Read what `bundle.json` says, of which the format alone is checked."""
    if not (folder / DESCRIPTION).is_file():
        raise FileNotFoundError(f"no bundle in {folder}: it has no {DESCRIPTION}")
    path = _inside(folder, DESCRIPTION)
    if path.stat().st_size > LARGEST_DESCRIPTION:
        raise ValueError(f"{path} is larger than {LARGEST_DESCRIPTION} bytes: it is no description of a bundle")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT:
        raise ValueError(f"{path} is of the format {found!r}, expected {FORMAT!r}")
    return content


def _inside(folder: Path, name: str) -> Path:
    """Give the path of a part, or refuse one that is missing or a link to somewhere else."""
    path = folder / name
    if not path.is_file():
        raise ValueError(f"{folder} is incomplete: it has no {name}")
    if not path.resolve().is_relative_to(folder.resolve()):
        raise ValueError(f"{path} is a link that leads out of the bundle: put the file itself there")
    return path


def _read_branch(path: Path, objective: Objective, classifier: Classifier, fingerprint: str) -> Branch:
    weights, notes = read_tensors(path)
    branch = objective.new_branch(classifier.feature_dim)
    assert branch is not None
    if notes.get(METADATA_KEY) != _branch_note(branch, fingerprint):
        raise ValueError(f"{path} is not the {branch.kind} branch of this model: copy the whole bundle again")
    problem = misfit(branch, weights)
    if problem is not None:
        raise ValueError(f"{path} does not fit a {branch.kind} branch on {classifier.feature_dim} features: {problem}")
    check_finite(weights, path)
    branch.load_state_dict(weights)
    return branch.to(classifier.device).eval()


def _branch_note(branch: Branch, fingerprint: str) -> str:
    return json.dumps({"kind": branch.kind, "fingerprint": fingerprint})


def _check_branch(classifier: Classifier, objective: Objective) -> None:
    """Refuse a branch that `load_bundle` could not read."""
    branch = classifier.branch
    kind = None if branch is None else branch.kind
    if kind != objective.branch:
        raise ValueError(f"the objective {objective.name} goes with the branch {objective.branch}, not {kind}")
    if branch is None:
        return
    with torch.device("meta"):  # shapes alone, and nobody's random numbers
        readable = objective.new_branch(classifier.feature_dim)
    assert readable is not None
    problem = misfit(readable, branch.state_dict())
    if problem is not None:
        raise ValueError(
            f"the branch is not one of the objective {objective.name} on {classifier.feature_dim} features, so the "
            f"bundle could not be read again ({problem}): make it with objective.new_branch({classifier.feature_dim})"
        )
