"""What each protocol lets a method do: reading, passes, branches and source access."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from torch import Tensor

import ttac
from ttac import Classifier, SourceStatistics, checks
from ttac.adaptation.method import Method
from ttac.evaluation.protocols import ProtocolError
from ttac.model.branches import ContrastiveBranch, RotationBranch
from ttac.model.networks import ResNet

Pairs = list[tuple[Tensor, Tensor]]


def pairs(subject: checks.Subject, shift: int = 0) -> Pairs:
    """The subject's stream with labels that follow from the order alone."""
    return [(images, (torch.arange(len(images)) + shift) % 4) for images in subject.batches()]


def branched(branch: type[ContrastiveBranch] | type[RotationBranch]) -> Classifier:
    torch.manual_seed(0)
    network = ResNet(8, 4, width=4)
    return Classifier(network, branch=branch(network.fc.in_features), mean=0, std=1).eval()


def test_multi_pass_is_learning_on_every_epoch_and_then_predicting() -> None:
    subject = checks.subject("ttac++", queue=0, passes=1)
    record = ttac.evaluate(subject.make(), pairs(subject), "N-M-SL", epochs=2)
    by_hand = subject.make()
    for _ in range(2):
        for images in subject.batches():
            by_hand(images)
    wrong = sum(int((by_hand.predict(images).argmax(1) != labels).sum()) for images, labels in pairs(subject))
    assert record.error == 100 * wrong / len(subject.images)
    assert record.samples == len(subject.images)
    assert record.provenance["epochs"] == 2
    assert record.counters["samples"] == 2 * len(subject.images)
    assert record.counters["steps"] == 2 * len(subject.images) // checks.WINDOW
    assert record.latency_ms["predict"]["count"] == len(subject.batches())
    assert record.latency_ms["update"]["count"] == 2 * len(subject.images) // checks.WINDOW


def test_multi_pass_keeps_labels_out_of_reach_and_counts_the_last_iterate() -> None:
    subject = checks.subject("tent")
    ends = []
    for shift in (0, 1):
        adapter = subject.make()
        ttac.evaluate(adapter, pairs(subject, shift), "N-M-SF", epochs=2)
        ends.append(adapter.state_dict())
    assert checks._same(*ends)


def test_the_target_set_is_shown_before_each_epoch_of_multi_pass_and_never_in_one_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown: list[tuple[int, int, int]] = []

    def look(self: Method, epoch: int, epochs: int, target: Iterable[Tensor]) -> None:
        shown.append((epoch, epochs, sum(len(images) for images in target)))

    subject = checks.subject("bn")
    adapter = subject.make()
    monkeypatch.setattr(type(adapter.method), "begin_epoch", look)
    ttac.evaluate(adapter, pairs(subject), "N-M-SF", epochs=2)
    assert shown == [(0, 2, 44), (1, 2, 44)]
    shown.clear()
    ttac.evaluate(subject.make(), pairs(subject), "N-O-SF")
    assert shown == []


def test_passes_that_a_protocol_does_not_have_are_refused() -> None:
    subject = checks.subject("bn")
    with pytest.raises(ProtocolError, match="reads every sample once"):
        ttac.evaluate(subject.make(), pairs(subject), "N-O-SF", epochs=2)
    with pytest.raises(TypeError, match="can be read once"):
        ttac.evaluate(subject.make(), iter(pairs(subject)), "N-M-SF")
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        ttac.evaluate(subject.make(), pairs(subject), "N-M-SF", epochs=0)


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_target_set_that_is_shuffled_on_every_pass_is_refused(epochs: int) -> None:
    subject = checks.subject("shot")

    class Shuffled:
        def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
            for rows in torch.randperm(len(subject.images)).split(checks.WINDOW):
                yield subject.images[rows], torch.zeros(len(rows)).long()  # labels that tell nothing

    torch.manual_seed(0)
    with pytest.raises(ValueError, match="shuffle it once"):
        ttac.evaluate(subject.make(), Shuffled(), "N-M-SF", epochs=epochs)


def test_who_has_seen_the_target_set_is_out_of_every_one_pass_protocol() -> None:
    subject = checks.subject("shot")
    prepared, learned = subject.make(), subject.make()
    prepared.begin_epoch(0, 1, iter(subject.batches()))
    ttac.evaluate(learned, pairs(subject), "N-M-SF", epochs=1)
    restored = subject.make()
    restored.load_state_dict(prepared.state_dict())
    for adapter in (prepared, learned, restored):
        for continuing in (False, True):
            with pytest.raises(ProtocolError, match="has been through a target set"):
                ttac.evaluate(adapter, pairs(subject), "N-O-SF", continuing=continuing)
        adapter.reset()
        assert ttac.evaluate(adapter, pairs(subject), "N-O-SF").provenance["reset"] == "fresh"


def test_posteriors_are_remembered_from_epoch_to_epoch() -> None:
    subject = checks.subject("ttac", queue=0, passes=1, tau_tc=-0.001, cooldown=5)
    adapter = subject.make()
    images = subject.images[: 4 * checks.WINDOW]
    visits = []
    for epoch in range(3):
        adapter.begin_epoch(epoch, 3, iter([images]))
        for batch in images.split(checks.WINDOW // 2 + 1):
            adapter.learn(batch)
        visits.append(adapter.memory_in_use.columns["visits"].tolist())
    assert visits == [[number] * checks.WINDOW for number in (1, 2, 3)]
    one_pass = subject.make()
    for _ in range(2):
        one_pass(images)
    assert set(one_pass.memory_in_use.columns["visits"].tolist()) == {1}  # the same image again is another sample there


def test_an_interrupted_call_is_not_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = checks.subject("tent")
    adapter = subject.make()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(adapter.method, "losses", interrupt)
    with pytest.raises(KeyboardInterrupt):
        adapter(subject.images)
    with pytest.raises(ProtocolError, match="has already seen 44 samples"):
        ttac.evaluate(adapter, pairs(subject), "N-O-SF")


def test_resets_within_a_stream_do_not_belong_to_several_passes() -> None:
    subject = checks.subject("tent", reset_every=16)
    with pytest.raises(ProtocolError, match="reset_every"):
        ttac.evaluate(subject.make(), pairs(subject), "N-M-SF")
    record = ttac.evaluate(subject.make(), pairs(subject), "N-O-SF")
    plain = ttac.evaluate(checks.subject("tent").make(), pairs(subject), "N-O-SF")
    assert record.counters["samples"] == plain.counters["samples"]
    assert record.counters["steps"] > 4  # those of all stretches


def test_what_is_no_statistics_is_refused_with_the_choice(tiny_classifier: Classifier) -> None:
    with pytest.raises(TypeError, match=r"stats must be ttac\.SourceStatistics, not list"):
        ttac.adapt(tiny_classifier, "ttac", stats=[(torch.rand(4, 3, 16, 16), torch.arange(4))])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="source_loader"):
        ttac.evaluate(ttac.adapt(tiny_classifier, "bn"), [], "N-O-SF", source_loader=[])  # type: ignore[call-arg]


# Branches


@pytest.mark.parametrize("method", ["ttac", "ttac++", "ttac+shot"])
def test_a_branch_needs_a_modified_objective(method: str) -> None:
    classifier = branched(ContrastiveBranch)
    subject = checks.subject(method, classifier, contrastive_weight=0.5)
    with pytest.raises(ProtocolError, match=r"uses the model's contrastive branch.*Y-O-SL"):
        ttac.evaluate(subject.make(), pairs(subject), "N-O-SL")
    record = ttac.evaluate(subject.make(), pairs(subject), "Y-O-SL")
    assert record.provenance["knowledge"]["contrastive branch"]["level"] == "objective"


def test_without_its_branch_a_model_is_a_plain_classifier() -> None:
    classifier = branched(ContrastiveBranch)
    subject = checks.subject("ttac++", classifier)
    adapter = subject.make()
    assert adapter.classifier.branch is None
    assert classifier.branch is not None  # the user's own is untouched
    plain = Classifier(classifier.model, mean=0, std=1).eval()
    records = [
        ttac.evaluate(made.make(), pairs(subject), "N-O-SL") for made in (subject, checks.subject("ttac++", plain))
    ]
    assert records[0].error == records[1].error


def test_modified_objectives_are_for_what_the_branch_brings() -> None:
    subject = checks.subject("ttac++", branched(ContrastiveBranch))
    with pytest.raises(ProtocolError, match="leaves its contrastive branch unused"):
        ttac.evaluate(subject.make(), pairs(subject), "Y-O-SL")
    ttac.evaluate(checks.subject("test", branched(ContrastiveBranch)).make(), pairs(subject), "Y-O-SL")


def test_modified_objectives_need_a_branch() -> None:
    subject = checks.subject("ttac++")
    with pytest.raises(ProtocolError, match="trained with a branch, and this one has none"):
        ttac.evaluate(subject.make(), pairs(subject), "Y-O-SL")
    for classifier, found in (
        (Classifier(ResNet(8, 4, width=4), mean=0, std=1), "statistics"),
        (branched(RotationBranch), "statistics, rotation branch"),
    ):
        stats = SourceStatistics.rescale_weights(classifier)
        with pytest.raises(
            ValueError, match=f"needs to know the contrastive branch of the source, and is given {found}:"
        ):
            ttac.adapt(classifier, "ttac++", stats=stats, contrastive_weight=1.0)


def test_the_contrastive_branch_teaches_the_backbone_and_stays_as_it_is() -> None:
    classifier = branched(ContrastiveBranch)
    assert classifier.branch is not None
    before = {name: value.clone() for name, value in classifier.branch.state_dict().items()}
    ends = []
    for weight in (0.5, 1.0):
        alone = {"class_weight": 0.0, "global_weight": 0.0, "contrastive_weight": weight}
        adapter = checks.subject("ttac", classifier, **alone).make()
        adapter(checks.subject("ttac", classifier).images)
        assert adapter.classifier.branch is not None
        after = adapter.classifier.branch.state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        ends.append(adapter.classifier.model.conv1.weight)
    assert not torch.equal(*ends)


@pytest.mark.parametrize("make", [SourceStatistics.infer, SourceStatistics.rescale_weights])
def test_source_free_statistics_are_admitted_under_source_free_protocols(
    make: Callable[[Classifier], SourceStatistics], tiny_classifier: Classifier
) -> None:
    adapter = ttac.adapt(tiny_classifier, "ttac", stats=make(tiny_classifier), window=4, queue=0, passes=1)
    stream = [(torch.rand(8, 3, 16, 16), torch.arange(8))]
    assert ttac.evaluate(adapter, stream, "N-M-SF", epochs=1).provenance["knowledge"]["statistics"]["samples"] == 0
