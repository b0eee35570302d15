"""Knowledge of a new kind, defined outside the package: handed over, checked by protocols, kept in bundles."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import ttac
from ttac import Classifier, checks
from ttac.adaptation.method import Batch, Capabilities
from ttac.adaptation.step import Loss
from ttac.evaluation.protocols import ProtocolError
from ttac.methods.tent import Tent
from ttac.model.networks import ResNet
from ttac.model.weights import ModelDescription
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.knowledge import STORED, Level, TrainingLoss, stored
from ttac.source.objectives import CrossEntropy, Poly


@dataclass(frozen=True, eq=False)
class Fisher:
    """How much the source's loss minds a change of each norm parameter."""

    kind: ClassVar[str] = "fisher information"
    level: ClassVar[Level] = "light"

    values: Mapping[str, Tensor]

    def provenance(self) -> dict[str, Any]:
        return {"parameters": len(self.values)}

    def fingerprint(self) -> str:
        return str(sorted((name, float(value.sum())) for name, value in self.values.items()))

    def check(self, classifier: Classifier) -> None:
        unknown = self.values.keys() - dict(classifier.named_parameters()).keys()
        if unknown:
            raise ValueError(f"the model has no {', '.join(sorted(unknown))}")

    def to(self, device: torch.device) -> Fisher:
        return Fisher({name: value.to(device) for name, value in self.values.items()})

    def save(self, path: Path) -> None:
        save_file(dict(self.values), path)

    @classmethod
    def load(cls, path: Path, classifier: Classifier) -> Fisher:
        return cls(load_file(path))


class HeldTent(Tent):
    """TENT that is held near the source where its loss minds: the regulariser of EATA."""

    capabilities = Capabilities(
        "held-tent", "Held TENT", ("N-O-SF", "N-O-SL"), needs=(Fisher.kind,), changes="norm layers", citation="-"
    )

    def losses(self, batch: Batch) -> dict[str, Loss]:
        fisher = self.knowledge[Fisher.kind]
        assert isinstance(fisher, Fisher)
        source, moving = self.adapter.source, self.adapter.parameters
        far = [(fisher.values[name] * (value - source[name]).square()).sum() for name, value in moving.items()]
        return {**super().losses(batch), "fisher": 10 * torch.stack(far).sum()}


@pytest.fixture
def fisher(tiny_classifier: Classifier) -> Fisher:
    adapter = ttac.adapt(tiny_classifier, "tent")
    return Fisher({name: torch.ones_like(value) for name, value in adapter.parameters.items()})


@pytest.fixture
def kept() -> Iterator[None]:
    """Let bundles keep Fisher information for the length of a test."""
    stored(Fisher)
    yield
    del STORED[Fisher.kind]


def test_a_method_asks_for_it_by_name_and_the_protocols_look_at_its_level(
    tiny_classifier: Classifier, fisher: Fisher
) -> None:
    with pytest.raises(ValueError, match="needs to know the fisher information of the source, and is given nothing"):
        ttac.adapt(tiny_classifier, HeldTent)
    adapter = ttac.adapt(tiny_classifier, HeldTent, knowledge=[fisher], window=4)
    stream = [(torch.rand(8, 3, 16, 16), torch.arange(8))]
    with pytest.raises(ProtocolError, match="source-free"):
        ttac.evaluate(adapter, stream, "N-O-SF")
    record = ttac.evaluate(adapter, stream, "N-O-SL")
    assert record.provenance["knowledge"] == {Fisher.kind: {"level": "light", "parameters": len(fisher.values)}}
    assert {"entropy", "fisher"} == record.losses[-1][1].keys()


def test_a_state_goes_on_with_the_same_knowledge_alone(tiny_classifier: Classifier, fisher: Fisher) -> None:
    other = Fisher({name: 2 * value for name, value in fisher.values.items()})
    state = ttac.adapt(tiny_classifier, HeldTent, knowledge=[fisher]).state_dict()
    with pytest.raises(ValueError, match="another knowledge"):
        ttac.adapt(tiny_classifier, HeldTent, knowledge=[other]).load_state_dict(state)


def test_knowledge_of_another_model_and_twice_the_same_kind_are_refused(
    tiny_classifier: Classifier, fisher: Fisher
) -> None:
    with pytest.raises(ValueError, match=r"the model has no nothing\.weight"):
        ttac.adapt(tiny_classifier, "tent", knowledge=[Fisher({"nothing.weight": torch.ones(1)})])
    with pytest.raises(ValueError, match="two pieces of knowledge"):
        ttac.adapt(tiny_classifier, HeldTent, knowledge=[fisher, fisher])
    with pytest.raises(TypeError, match="is no knowledge"):
        ttac.adapt(tiny_classifier, "tent", knowledge=["rumours"])  # type: ignore[list-item]


def test_the_conformance_suite_takes_it(fisher: Fisher) -> None:
    torch.manual_seed(0)
    classifier = Classifier(ResNet(8, 4, width=4), mean=0, std=1).eval()
    own = {name: torch.ones_like(value) for name, value in ttac.adapt(classifier, "tent").parameters.items()}
    checks.run_all(HeldTent, classifier, side=8, knowledge=[Fisher(own)])


def test_bundles_keep_it(tiny_classifier: Classifier, fisher: Fisher, kept: None, tmp_path: Path) -> None:
    description = ModelDescription("resnet8", 10, arch_options={"width": 4})
    save_bundle(tmp_path, Bundle(tiny_classifier, description, CrossEntropy(), stored=(fisher,)))
    found = {one.kind: one for one in load_bundle(tmp_path).knowledge}
    assert found.keys() == {Fisher.kind, TrainingLoss.kind}
    assert found[Fisher.kind].fingerprint() == fisher.fingerprint()


def test_the_training_loss_is_knowledge_that_conjugate_labels_go_by(tiny_classifier: Classifier) -> None:
    known = [Poly(epsilon=3.0).training_loss()]
    options = ttac.adapt(tiny_classifier, "conjugate", knowledge=known).options
    assert (options.source_loss, options.epsilon) == ("poly", 3.0)
    with pytest.raises(ValueError, match=r"epsilon=1\.0 contradicts the model"):
        ttac.adapt(tiny_classifier, "conjugate", knowledge=known, epsilon=1.0)
