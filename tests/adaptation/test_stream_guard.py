"""A guard within one process: what collapses is undone, and all else is as it would be without it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from guard_helpers import CLASSES, WIDTH, collected, mixed, network, pictures
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics, adapt, checks, evaluate
from ttac.adaptation.adapter import Adapter
from ttac.adaptation.guard import GuardOptions
from ttac.adaptation.measures import information
from ttac.adaptation.reduction import Reduction
from ttac.adaptation.stream_guard import EVENTS
from ttac.evaluation.protocols import ProtocolError
from ttac.methods.registry import find_method

WINDOW = 64
WILD: dict[str, Any] = {"window": WINDOW, "lr": 20.0}  # Adam's steps are as long as that


def hard(labels: Tensor, seed: int) -> Tensor:
    """Make images of the classes that are easily taken for those of others."""
    pixels = pictures(labels, seed)
    noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed + 1))
    return (pixels + 0.2 * noise).clamp(0, 1)


@pytest.fixture
def source() -> Classifier:
    """A network with a norm layer, which TENT adapts."""
    layer, norm, head = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH, momentum=1.0), nn.Linear(WIDTH, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.eye(WIDTH))
        layer.bias.zero_()
        head.weight.copy_(4 * torch.eye(CLASSES, WIDTH))
        head.bias.zero_()
        model = nn.Sequential(nn.Flatten(), layer, norm, head).train()
        model(hard(mixed(600, seed=9), seed=9))
    return Classifier(model, head="3", mean=0, std=1).eval()


LABELS = mixed(10 * WINDOW, seed=1)
IMAGES = hard(LABELS, seed=1)


def walked(adapter: Adapter, images: Tensor = IMAGES, size: int = WINDOW) -> Tensor:
    return torch.cat([adapter(batch) for batch in images.split(size)])


def error(logits: Tensor) -> float:
    return float((logits.argmax(1) != LABELS).float().mean())


def saved(adapter: Adapter) -> dict[str, Any]:
    """Take the state through a file."""
    file = io.BytesIO()
    torch.save(adapter.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)  # type: ignore[no-any-return]


# Collapse


def test_a_collapse_stays_near_the_source_with_a_guard_alone(source: Classifier) -> None:
    with torch.no_grad():
        before = error(source(IMAGES))
    assert before < 0.1
    assert error(walked(adapt(source, "tent", **WILD))) > 0.25
    guarded = adapt(source, "tent", guard=True, **WILD)
    assert error(walked(guarded)) < before + 0.02
    counts = guarded.counters()
    assert counts["guard_refusals"] == counts["rollbacks"] + counts["resets"] == 10
    assert [judged.action for judged in guarded.last_step.judgements] == ["reset"]


def test_the_window_of_a_refused_update_is_predicted_by_the_weights_that_were_kept(source: Classifier) -> None:
    for moment in ("during", "after"):
        adapter = adapt(source, "tent", guard=True, predict=moment, **WILD)
        with torch.no_grad():
            assert torch.equal(adapter(IMAGES[:WINDOW]), source(IMAGES[:WINDOW])), moment
        assert adapter.counters()["guard_refusals"] == 1


def test_a_refused_update_leaves_the_last_state_that_was_let_pass(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW)
    walked(adapter, IMAGES[: 3 * WINDOW])
    before = adapter.state_dict()
    rate = adapter.method.rate
    vars(adapter.method)["rate"] = lambda: 20.0
    adapter(IMAGES[3 * WINDOW : 4 * WINDOW])
    assert [judged.action for judged in adapter.last_step.judgements] == ["rollback"]
    after = adapter.state_dict()
    assert after["state"]["samples_seen"] == 4 * WINDOW
    assert after["state"]["memory"]["length"] == 0, "what led astray is not learned from again"
    assert checks._same(before["classifier"], after["classifier"])
    for part in ("steps", "norms", "answers", "method"):
        kept, now = dict(before["state"][part]), dict(after["state"][part])
        assert part != "steps" or (kept.pop("taken"), now.pop("taken")) == (3, 4)
        # Restored rates may differ, as they are set before each update.
        assert checks._same(_without_rates(kept), _without_rates(now)), part
    vars(adapter.method)["rate"] = rate
    adapter(IMAGES[4 * WINDOW : 5 * WINDOW])
    assert [judged.action for judged in adapter.last_step.judgements] == ["publish"], "learning goes on"


def _without_rates(state: dict[str, Any]) -> dict[str, Any]:
    state = copy.deepcopy(state)
    for group in state.get("optimizer", {}).get("param_groups", []):
        group.pop("lr")
    return state


def test_refusals_in_a_row_end_at_the_source_model(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=GuardOptions(rollbacks=1), window=WINDOW)
    adapter(IMAGES[:WINDOW])
    vars(adapter.method)["rate"] = lambda: 20.0
    actions = []
    for batch in IMAGES[WINDOW : 4 * WINDOW].split(WINDOW):
        adapter(batch)
        actions += [judged.action for judged in adapter.last_step.judgements]
    assert actions == ["rollback", "reset", "reset"]
    assert checks._same(dict(adapter.classifier.state_dict()), adapter.source)


def test_numbers_that_are_not_finite_are_undone(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW)
    after_step = adapter.answers.after_step

    def broken() -> None:
        after_step()
        with torch.no_grad():
            next(iter(adapter.parameters.values())).fill_(torch.nan)

    vars(adapter.answers)["after_step"] = broken
    assert bool(adapter(IMAGES[:WINDOW]).isfinite().all())
    assert "not finite" in str(adapter.guard)


# What is kept away


def test_images_of_one_colour_are_predicted_and_not_learned_from(source: Classifier) -> None:
    blank = torch.rand(WINDOW, 3, 1, 1, generator=torch.Generator().manual_seed(0)).expand(-1, 3, 2, 2)
    mix = torch.stack([IMAGES[:WINDOW], blank], 1).flatten(0, 1)
    for moment in ("before", "during", "after"):
        guarded = adapt(source, "tent", guard=True, predict=moment, window=WINDOW)
        plain = adapt(source, "tent", window=WINDOW)
        assert walked(guarded, mix).shape == (2 * WINDOW, CLASSES)
        walked(plain, IMAGES[:WINDOW])
        assert checks._same(dict(guarded.classifier.state_dict()), dict(plain.classifier.state_dict())), moment
        assert guarded.counters()["refused_samples"] == WINDOW
        assert guarded.samples_seen == 2 * WINDOW


def test_a_stream_of_blank_images_is_told(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW)
    walked(adapter, torch.zeros(2 * WINDOW, 3, 2, 2))
    walked(adapter, IMAGES[:WINDOW])
    assert adapter.guard is not None
    assert [(event["samples"], event["event"]) for event in adapter.guard.events] == [(64, "stop"), (192, "go on")]


def test_narrow_streams_are_learned_from_unless_the_options_say_otherwise(source: Classifier) -> None:
    narrow = hard(torch.zeros(4 * WINDOW, dtype=torch.int64), seed=2)
    for guard, refused in ((True, 0), (GuardOptions(narrow=0.6), 4 * WINDOW)):
        adapter = adapt(source, "bn", guard=guard, window=WINDOW)
        walked(adapter, narrow)
        assert adapter.counters()["refused_samples"] == refused


# All else


@pytest.mark.parametrize("method", ["bn", "tent", "ttac++"])
def test_a_guard_changes_nothing_where_nothing_is_wrong(source: Classifier, method: str) -> None:
    options: dict[str, Any] = {"window": WINDOW}
    if method == "ttac++":
        stats = SourceStatistics.collect(source, [(IMAGES, LABELS)])
        options |= {"queue": 2 * WINDOW, "passes": 1, "stats": stats}
    plain, guarded = (adapt(source, method, guard=guard, **options) for guard in (False, True))
    assert torch.equal(walked(plain), walked(guarded))
    assert guarded.counters() == plain.counters() | dict.fromkeys(guarded.guard.counts, 0)  # type: ignore[union-attr]
    assert checks._same(plain.state_dict()["state"], guarded.state_dict()["state"])
    assert plain.guard is None


@pytest.mark.parametrize("options", [{"window": WINDOW}, WILD], ids=["sound", "wild"])
def test_a_stream_goes_on_bit_for_bit(source: Classifier, options: dict[str, Any]) -> None:
    parts = IMAGES.split(40)  # windows end within arrivals
    whole = adapt(source, "tent", guard=True, **options)
    for batch in parts[:7]:
        whole(batch)
    resumed = adapt(source, "tent", guard=True, **options)
    resumed.load_state_dict(saved(whole))
    copied = copy.deepcopy(whole)
    for batch in parts[7:]:
        logits = whole(batch)
        assert torch.equal(resumed(batch), logits)
        assert torch.equal(copied(batch), logits)
    assert checks._same(saved(whole), saved(resumed))
    assert checks._same(saved(whole), saved(copied))
    assert whole.guard is not None
    assert resumed.guard is not None
    assert whole.guard.summary() == resumed.guard.summary()
    assert bool(whole.guard.events) == (options is WILD)


@pytest.mark.parametrize("options", [{"window": WINDOW}, WILD], ids=["sound", "wild"])
@pytest.mark.parametrize("check", ["predict_is_pure", "reset_equals_fresh", "memory_plateaus", "seeds_repeat"])
def test_a_guarded_adapter_keeps_the_promises_of_all(source: Classifier, check: str, options: dict[str, Any]) -> None:
    subject = checks.Subject(lambda: adapt(source, "tent", guard=True, **options), IMAGES[: 5 * WINDOW])
    getattr(checks, check)(subject)


def test_events_have_a_bound(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, **{**WILD, "window": 32})
    for _ in range(4):
        walked(adapter)
    assert adapter.guard is not None
    assert adapter.counters()["guard_refusals"] > EVENTS == len(adapter.guard.events)


def test_resets_of_the_method_go_together_with_a_guard(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW, reset_every=3 * WINDOW)
    walked(adapter)
    assert adapter.guard is not None
    assert adapter.guard.counts["guard_refusals"] == 0
    fresh = adapt(source, "tent", window=WINDOW, reset_every=3 * WINDOW)
    walked(fresh)
    assert checks._same(dict(adapter.classifier.state_dict()), dict(fresh.classifier.state_dict()))


def test_a_restart_is_gone_back_to(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW)
    weights = {name: tensor.clone() for name, tensor in source.model.state_dict().items()}
    weights["1.bias"] += 0.001
    adapter.restart_from(weights)
    walked(adapter, IMAGES[: WINDOW - 1])
    vars(adapter.method)["rate"] = lambda: 20.0
    adapter(IMAGES[WINDOW - 1 : WINDOW])
    assert [judged.action for judged in adapter.last_step.judgements] == ["rollback"]
    assert checks._same(dict(adapter.classifier.model.state_dict()), weights)


class Averaged(nn.Module):
    """A network whose logits no single layer gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1))
        self.one, self.two = nn.Linear(8, CLASSES), nn.Linear(8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        features = self.body(images).flatten(1)
        return (self.one(features) + self.two(features)) / 2


def test_a_model_without_a_linear_head_is_guarded_by_its_logits() -> None:
    torch.manual_seed(0)
    classifier = Classifier(Averaged().eval(), mean=0, std=1)
    assert not classifier.has_linear_head
    adapter = adapt(classifier, "bn", guard=True, window=WINDOW)
    adapter(IMAGES[:WINDOW])
    (judged,) = adapter.last_step.judgements
    assert judged.measures["norm"]["adapted"] == 0
    with torch.no_grad():
        posteriors = adapter.predict(IMAGES[:WINDOW].mul(255).round() / 255).softmax(1)
    assert judged.measures["information"]["adapted"] == pytest.approx(information(posteriors), abs=1e-6)


# Refusals


def test_states_of_guarded_and_other_adapters_are_not_mixed(source: Classifier) -> None:
    guards: list[Any] = [False, True, GuardOptions(distance=2.0)]
    for mine in guards:
        for other in guards:
            if mine is not other:
                state = adapt(source, "tent", guard=other).state_dict()
                with pytest.raises(ValueError, match="another guard"):
                    adapt(source, "tent", guard=mine).load_state_dict(state)


def test_a_guard_is_refused_where_it_cannot_judge(source: Classifier) -> None:
    with pytest.raises(ValueError, match="confidences of its own"):
        adapt(source, "t3a", guard=True)
    with pytest.raises(TypeError, match="guard must be"):
        adapt(source, "tent", guard="yes")  # type: ignore[arg-type]
    stats = SourceStatistics.collect(source, [(IMAGES, LABELS)])
    idle = adapt(source, "test", stats=stats, guard=True)
    assert (idle.guard, idle.knowledge) == (None, {}), "nothing is learned"
    assert copy.deepcopy(idle).guard is None

    class Two(Reduction):
        ranks = 2

    tent = find_method("tent")
    with pytest.raises(ValueError, match="several ranks"):
        Adapter(source, tent, tent.options_type(), reduction=Two(), guard=GuardOptions())


def test_several_passes_are_refused_and_nothing_changes(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, window=WINDOW)
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="comes once"):
        adapter.learn(IMAGES[:8])
    with pytest.raises(ValueError, match="comes once"):
        evaluate(adapter, [(IMAGES, LABELS)], "N-M-SF")
    assert checks._same(before, adapter.state_dict())


def test_statistics_of_the_source_that_a_guard_uses_count_for_the_protocol(source: Classifier) -> None:
    stats = SourceStatistics.collect(source, [(IMAGES, LABELS)])
    stream = [(IMAGES, LABELS)]
    adapter = adapt(source, "tent", stats=stats, guard=True, window=WINDOW)
    with pytest.raises(ProtocolError, match="source-free"):
        evaluate(adapter, stream, "N-O-SF")
    plain = adapt(source, "tent", stats=stats, window=WINDOW)
    assert evaluate(plain, stream, "N-O-SF").guard == {}


def test_a_record_tells_what_the_guard_saw_and_when(source: Classifier) -> None:
    adapter = adapt(source, "tent", guard=True, **WILD)
    record = evaluate(adapter, list(zip(IMAGES.split(WINDOW), LABELS.split(WINDOW), strict=True)), "N-O-SF")
    assert (record.guard["guard_refusals"], record.guard["resets"]) == (10, 10)
    assert [event["samples"] for event in record.guard["events"]] == [WINDOW * number for number in range(1, 11)]
    first = record.guard["events"][0]
    assert first["event"] == "reset"
    assert "its features are 69 long" in first["reasons"][0]
    assert first["measures"]["norm"]["adapted"] > first["measures"]["norm"]["limit"]
    assert record.guard["options"]["information"] == 0.8
    assert record.counters["guard_refusals"] == 10


def test_the_network_of_the_servers_guard_is_unharmed_by_a_method_with_statistics() -> None:
    clf = network()
    stats = collected(clf)
    adapter = adapt(clf, "ttac", stats=stats, guard=True, window=WINDOW, queue=0, passes=1)
    walked(adapter, pictures(LABELS, seed=1))
    assert adapter.counters()["guard_refusals"] == 0
    assert adapter.last_step.judgements[0].measures["distance"]["adapted"] is not None
