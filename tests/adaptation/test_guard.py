"""The guard: which streams it lets through, which candidates it publishes."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable

import pytest
import torch
from guard_helpers import CLASSES, WIDTH, collected, mixed, network, parts, pictures
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics
from ttac.adaptation.guard import LEAST, Guard, GuardOptions, GuardReport
from ttac.adaptation.measures import information


@pytest.fixture
def source() -> Classifier:
    return network()


@pytest.fixture
def statistics(source: Classifier) -> SourceStatistics:
    return collected(source)


def strict(source: Classifier, stats: SourceStatistics | None = None, **options: float) -> Guard:
    """Make a guard that does not let a model learn from narrow streams, as that of the server."""
    return Guard(source, stats, GuardOptions(**{"narrow": 0.6, **options}))  # type: ignore[arg-type]


def watching(source: Classifier, stats: SourceStatistics | None, **options: float) -> Guard:
    """Make a guard that has seen a healthy stream."""
    guard = strict(source, stats, **options)
    for chunk in pictures(mixed(256)).split(64):
        assert torch.equal(guard.admit(chunk), chunk)
    assert guard.refused is None
    return guard


def settled(guard: Guard, candidate: Classifier) -> str:
    """Judge a candidate and do what the guard says, as the learner does."""
    action = guard.check(candidate).action
    if action != "rollback":
        guard.published(None if action == "reset" else candidate.model.state_dict())
    return action


# Streams


@pytest.mark.parametrize("with_statistics", [True, False])
def test_one_class_is_not_learned_from_while_it_lasts(
    source: Classifier, statistics: SourceStatistics, with_statistics: bool
) -> None:
    guard = watching(source, statistics if with_statistics else None)
    narrow = pictures(torch.full((256,), 2), seed=3).split(64)
    admitted = [len(guard.admit(chunk)) for chunk in narrow]
    assert admitted[1:] == [0, 0, 0]  # the first chunk is too little to tell
    assert guard.refused is not None
    assert "sees 1.0 classes" in guard.refused
    healthy = [len(guard.admit(chunk)) for chunk in pictures(mixed(192, seed=4)).split(64)]
    assert healthy[1:] == [64, 64]
    assert guard.refused is None


def test_a_stream_that_begins_narrow_is_refused_at_once(source: Classifier) -> None:
    guard = strict(source)
    assert len(guard.admit(pictures(torch.zeros(LEAST, dtype=torch.int64)))) == 0


def test_few_samples_tell_nothing(source: Classifier) -> None:
    guard = strict(source)
    for image in pictures(torch.zeros(LEAST - 1, dtype=torch.int64)).split(1):
        assert len(guard.admit(image)) == 1


def test_some_classes_of_many_are_no_poison(source: Classifier) -> None:
    guard = strict(source)
    half = pictures(torch.arange(256) % (CLASSES // 2 + 1))
    assert sum(len(guard.admit(chunk)) for chunk in half.split(64)) == 256


def test_a_source_of_unequal_classes_expects_them(source: Classifier) -> None:
    """Nine in ten samples of one class are narrow, unless the source was like that."""
    labels = torch.where(torch.arange(600) % 10 == 0, mixed(600), 0)
    chunk = pictures(labels[:120], seed=1)
    assert len(strict(source).admit(chunk)) == 0
    stats = SourceStatistics.collect(source, [(pictures(labels), labels)])
    assert len(strict(source, stats).admit(chunk)) == 120


def test_images_of_one_colour_are_left_out(source: Classifier) -> None:
    guard = watching(source, None)
    chunk = pictures(mixed(64, seed=6), seed=6)
    chunk[10:30] = torch.rand(20, 3, 1, 1)
    kept = torch.cat([chunk[:10], chunk[30:]])
    assert torch.equal(guard.admit(chunk), kept)
    assert guard.refused is None, "some blank images say nothing of the stream"
    assert len(guard.admit(torch.zeros(64, 3, 2, 2))) == 0
    assert guard.refused == "the last 64 images are of one colour"
    assert torch.equal(guard.admit(kept), kept)
    assert guard.refused is None


def test_a_stream_of_blank_images_is_said_to_be_one_also_where_they_come_one_by_one(source: Classifier) -> None:
    guard = watching(source, None)
    said = []
    for _ in range(40):
        assert len(guard.admit(torch.zeros(1, 3, 2, 2))) == 0
        said.append(guard.refused)
    assert said == [None] * (LEAST - 1) + [f"the last {count} images are of one colour" for count in range(LEAST, 41)]
    for image in pictures(mixed(20)).split(1):  # every other image of a camera that flickers
        guard.admit(image)
        assert guard.refused is None
        guard.admit(torch.zeros(1, 3, 2, 2))
        assert guard.refused is None


def test_narrow_streams_are_learned_from_unless_asked_otherwise(source: Classifier) -> None:
    narrow = pictures(torch.full((256,), 2), seed=3).split(64)
    guard = Guard(source, None)
    assert [len(guard.admit(chunk)) for chunk in narrow] == [64] * 4
    assert guard.refused is None
    assert len(guard.admit(torch.zeros(64, 3, 2, 2))) == 0
    wary = strict(source)
    for chunk in narrow:
        wary.admit(chunk)
    guard.load_state(wary.state())  # one that was strict before
    assert len(guard.admit(narrow[0])) == 64


def test_a_thousand_classes_seen_by_few_samples_are_not_narrow() -> None:
    torch.manual_seed(0)
    source = Classifier(
        nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Linear(48, 1000)), "2", mean=0.5, std=1
    ).eval()
    with torch.no_grad():
        source.head.weight.mul_(50)
    guard = strict(source)
    images = torch.rand(192, 3, 4, 4)
    for chunk in images.split(16):
        assert len(guard.admit(chunk)) == 16
    candidate = source.copy()
    with torch.no_grad():
        candidate.head.weight.add_(0.05 * torch.randn_like(candidate.head.weight))
    assert guard.check(candidate).action == "publish"
    assert len(guard.admit(images[:1].repeat(128, 1, 1, 1))) == 0


# Candidates


def collapse(candidate: Classifier) -> None:
    parts(candidate)[1].bias[3] += 100


def doubt(candidate: Classifier) -> None:
    parts(candidate)[1].weight *= 0.05


def confuse(candidate: Classifier) -> None:
    parts(candidate)[1].weight.copy_(parts(candidate)[1].weight.roll(1, 0))


def depart(candidate: Classifier) -> None:
    parts(candidate)[0].bias[CLASSES:] += 0.2  # features that the head does not look at


def grow(candidate: Classifier) -> None:
    layer, head = parts(candidate)
    layer.weight *= 10
    head.weight /= 10


HARMS: dict[Callable[[Classifier], None], tuple[str, bool]] = {  # what is said, and whether it takes statistics
    collapse: ("nats", False),
    doubt: ("nats", False),
    confuse: ("agrees", False),
    depart: ("anchors", True),
    grow: ("long", False),
}


@pytest.mark.parametrize("harm", HARMS)
def test_each_harm_is_seen(
    harm: Callable[[Classifier], None], source: Classifier, statistics: SourceStatistics
) -> None:
    reason, by_distance = HARMS[harm]
    candidate = source.copy()
    with torch.no_grad():
        harm(candidate)
    report = watching(source, statistics if by_distance else None).check(candidate)
    assert report.action == "reset"  # nothing but the source model was published before
    assert reason in report.reasons[0]


@pytest.mark.parametrize("with_statistics", [True, False])
def test_a_candidate_like_the_source_is_published(
    source: Classifier, statistics: SourceStatistics, with_statistics: bool
) -> None:
    guard = watching(source, statistics if with_statistics else None)
    candidate = source.copy()
    with torch.no_grad():
        for parameter in candidate.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    report = guard.check(candidate)
    assert report.action == "publish"
    assert report.reasons == ()
    assert list(report.measures) == ["entropy", "balance", "information", "agreement", "norm", "distance"]
    assert (report.measures["distance"]["adapted"] is not None) == with_statistics
    assert [len(far) for far in report.distances.values()] == ([CLASSES, CLASSES] if with_statistics else [])


def test_a_model_that_follows_a_shift_is_published(source: Classifier, statistics: SourceStatistics) -> None:
    """Where the source model is lost, to differ from it is no fault."""
    guard = strict(source, statistics)
    labels = mixed(256)
    shifted = pictures(labels).flatten(1).roll(CLASSES, 1).reshape(-1, 3, 2, 2)  # other pixels are lit
    for chunk in shifted.split(64):
        assert len(guard.admit(chunk)) == 64
    candidate = source.copy()
    with torch.no_grad():
        parts(candidate)[0].weight.copy_(torch.eye(WIDTH).roll(CLASSES, 1))
        assert float((candidate(shifted).argmax(1) == labels).float().mean()) == 1
        assert float((source(shifted).argmax(1) == labels).float().mean()) < 0.5
    assert guard.check(candidate).action == "publish"


def test_numbers_that_are_not_finite_are_undone_at_once(source: Classifier) -> None:
    broken = source.copy()
    with torch.no_grad():
        parts(broken)[0].weight[0, 0] = torch.nan
    assert strict(source).check(broken).action == "reset"  # nothing but the source was ever published
    guard = watching(source, None)
    assert settled(guard, source) == "publish"
    report = guard.check(broken)
    assert report == GuardReport("rollback", ("its weights are not finite",), {}, {})
    huge = source.copy()
    with torch.no_grad():
        parts(huge)[0].weight.mul_(1e30)
        parts(huge)[1].weight.mul_(1e30)
    assert guard.check(huge).reasons == ("its outputs are not finite",)


def test_a_candidate_of_few_samples_waits_for_more(source: Classifier) -> None:
    guard = strict(source)
    assert guard.check(source).action == "wait"
    images = pictures(mixed(LEAST))
    guard.admit(images[1:])
    assert guard.check(source).action == "wait"
    guard.admit(images[:1])
    assert guard.check(source).action == "publish"


def test_refusals_in_a_row_end_in_a_reset(source: Classifier) -> None:
    guard = watching(source, None, rollbacks=2)
    bad = source.copy()
    with torch.no_grad():
        collapse(bad)
    actions = [settled(guard, model) for model in (source, bad, bad, bad, bad, source, bad, source, bad)]
    expected = ["publish", "rollback", "rollback", "reset", "reset", "publish", "rollback", "publish", "rollback"]
    assert actions == expected


def test_what_was_published_is_not_gone_back_to_where_it_fails_now(source: Classifier) -> None:
    """What looked well on the samples of then may fail on those of now."""
    guard = watching(source, None)
    blind = source.copy()
    with torch.no_grad():
        parts(blind)[1].weight[:3] = 0  # sees the last three classes alone
    some = pictures(3 + torch.arange(256) % 3, seed=7)
    for chunk in some.split(64):
        assert len(guard.admit(chunk)) == 64
    assert settled(guard, blind) == "publish"
    for chunk in pictures(mixed(256, seed=8), seed=8).split(64):
        guard.admit(chunk)
    assert guard.check(blind).action == "reset"
    guard.published(source.model.state_dict())  # an administrator's choice, which does well on the samples of now
    assert guard.check(blind).action == "rollback"
    guard.published(None)
    assert guard.check(blind).action == "reset"


def test_what_is_let_pass_and_not_published_is_not_gone_back_to(source: Classifier) -> None:
    """A full disk may come between."""
    guard = watching(source, None)
    bad = source.copy()
    with torch.no_grad():
        collapse(bad)
    assert guard.check(source).action == "publish"
    assert guard.check(bad).action == "reset"


def test_probes_are_judged_in_small_passes_with_the_same_result(
    source: Classifier, statistics: SourceStatistics, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard = watching(source, statistics, probes=150)
    candidate = source.copy()
    with torch.no_grad():
        doubt(candidate)
    sizes: list[int] = []
    real = Classifier.features_and_logits

    def noted(self: Classifier, images: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(images))
        return real(self, images)

    monkeypatch.setattr(Classifier, "features_and_logits", noted)
    guard.published(source.model.state_dict())
    report = guard.check(candidate)
    assert sizes == [64, 64, 22] * 2, "of the candidate, then of what was published"
    with torch.no_grad():
        logits = candidate(pictures(mixed(256))[-150:].mul(255).round() / 255)
    expected = information(logits.softmax(1))
    assert report.measures["information"]["adapted"] == pytest.approx(expected, rel=1e-4)


def test_a_candidate_is_judged_by_admitted_samples(source: Classifier) -> None:
    guard = watching(source, None)
    before = guard.check(source).measures
    for chunk in pictures(torch.full((256,), 1)).split(64):
        guard.admit(chunk)
    guard_of_first = watching(source, None)
    guard_of_first.admit(pictures(torch.full((256,), 1)).split(64)[0])
    assert guard.check(source).measures == guard_of_first.check(source).measures != before


def test_nothing_is_changed_by_a_check(source: Classifier, statistics: SourceStatistics) -> None:
    guard = watching(source, statistics)
    candidate = source.copy().train()
    before = candidate.fingerprint()
    assert settled(guard, candidate) == "publish"
    assert candidate.training
    assert candidate.fingerprint() == before
    with torch.no_grad():
        collapse(candidate)  # the guard keeps a copy of what it published
    assert guard.check(candidate).action == "rollback"


# State


def test_a_guard_goes_on_from_its_state(source: Classifier, statistics: SourceStatistics) -> None:
    guard = watching(source, statistics)
    settled(guard, source)
    bad = source.copy()
    with torch.no_grad():
        collapse(bad)
    guard.check(bad)
    for chunk in pictures(torch.full((128,), 2)).split(64):
        guard.admit(chunk)
    file = io.BytesIO()
    torch.save(guard.state(), file)
    file.seek(0)
    other = strict(network(), statistics)
    other.load_state(torch.load(file, weights_only=True))
    assert (other.refused, other.refusals) == (guard.refused, guard.refusals) != (None, 0)
    for seed in range(3):
        chunk = pictures(mixed(40, seed), seed)
        assert torch.equal(guard.admit(chunk), other.admit(chunk))
        assert dataclasses.astuple(guard.check(bad)) == dataclasses.astuple(other.check(bad))


def test_the_state_of_a_new_guard_is_one_too(source: Classifier) -> None:
    guard = watching(source, None)
    guard.load_state(strict(source).state())
    assert guard.check(source).measures == {}


def test_a_state_of_another_model_is_refused(source: Classifier) -> None:
    guard = watching(source, None)
    state = guard.state()
    state["_probes"] = {**state["_probes"], "logits": torch.zeros(256, CLASSES + 1)}
    with pytest.raises(ValueError, match="another model"):
        strict(source).load_state(state)


@pytest.mark.parametrize(
    "wrong", [{"probes": 3}, {"recent": 0}, {"narrow": 2.0}, {"distance": 0.5}, {"norm": 1.0}, {"rollbacks": -1}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        GuardOptions(**wrong)  # type: ignore[arg-type]
