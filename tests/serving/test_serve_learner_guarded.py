"""A learner and its guard: what each is told, what the journal and the status say, and what a full disk changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import SHAPE, WINDOW, ScriptedGuard, Service, learn_all, same
from test_serve_state_folder import files_limited_to
from torch import Tensor, nn

from ttac import Classifier, SourceStatistics, adapt
from ttac.adaptation.guard import Guard, GuardOptions
from ttac.serving.learner import Learner

CLASSES = 4


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path / "state")


def learned(service: Service, learner: Learner, seed: int) -> None:
    """Learn from a window."""
    service.push(torch.rand(WINDOW, *SHAPE, generator=torch.Generator().manual_seed(seed)))
    learn_all(learner)


def packed(service: Service, guard: ScriptedGuard) -> bytes | None:
    """Give what the guard was told last, as the predictor would read it; None for the source model."""
    told = guard.told[-1]
    return None if told is None else bytes(service.layout.pack(told))


# What the guard is told


def test_the_guard_is_told_what_is_served_and_nothing_else(service: Service) -> None:
    guard = ScriptedGuard("publish", "publish", "rollback", "reset")
    learner = service.started(chunk=WINDOW, guard=guard)
    assert guard.told == [None], "the source model"
    for seed in (1, 2):
        learned(service, learner, seed)
        assert packed(service, guard) == service.serve()[1]
    learned(service, learner, 3)
    assert len(guard.told) == 3, "a rollback publishes nothing"
    learned(service, learner, 4)
    assert packed(service, guard) is None
    service.ask(learner, "rollback", version=2)
    assert packed(service, guard) == service.packed(2)
    service.ask(learner, "reset")
    assert packed(service, guard) is None


def test_the_guard_is_not_told_what_could_not_be_written(service: Service) -> None:
    guard = ScriptedGuard()
    learner = service.started(chunk=WINDOW, guard=guard)
    with files_limited_to(service.folder.events.stat().st_size + 4000):
        learned(service, learner, 1)
    assert guard.told == [None]
    learner.releases.settle()
    assert packed(service, guard) == service.serve()[1] == service.packed(service.serve()[0])


@pytest.mark.parametrize("command", ["reset", "rollback"])
def test_a_reset_that_could_not_be_written_is_not_undone(service: Service, command: str) -> None:
    guard = ScriptedGuard()
    learner = service.started(chunk=WINDOW, guard=guard)
    for seed in (1, 2, 3):
        learned(service, learner, seed)
    wanted = service.packed(1 if command == "reset" else 2)
    with files_limited_to(service.folder.events.stat().st_size + 4000):
        reply = service.ask(learner, command, **({"version": 2} if command == "rollback" else {}))
        assert not reply["ok"]
        assert "tried again" in reply["message"]
        gone_back = learner.adapter.state_dict()
        guard.actions = ["rollback"]
        learned(service, learner, 4)
        learner.releases.settle()
        assert service.serve() == (4, service.packed(4))
    assert same(learner.adapter.state_dict(), gone_back)
    assert service.events("rollback")[-1] == "the adapter went back to the weights that are published next"
    learner.turn()
    version, content = service.serve()
    assert version > 4
    assert content == wanted == service.packed(version)
    guard.actions = ["rollback"]
    learned(service, learner, 5)
    assert service.serve() == (version, wanted)
    assert service.events("rollback")[-1] == f"the adapter went back to version {version}"


# What the journal and the status say


def test_refusals_without_end_leave_room_in_the_journal(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    guard = ScriptedGuard("publish", *["rollback"] * 5, *["reset"] * 6)
    learner = service.started(chunk=WINDOW, guard=guard)
    for seed in range(12):
        learned(service, learner, seed)
    tally = learner.tally
    assert (tally.guard_refusals, tally.rollbacks, tally.resets) == (11, 5, 6)
    # The first reset published the source model, so the next refusal was news again.
    refused = "not published: it collapsed"
    reset = "the guard went back to the source model"
    back = "the adapter went back to version 2"
    assert service.events("guard", "rollback", "reset") == [refused, back, reset, refused, reset]
    now[0] += 61
    guard.actions = ["rollback"]
    learned(service, learner, 12)
    (last,) = [entry for entry in service.journal.tail(2) if entry["event"] == "guard"]
    assert (last["unsaid"], last["version"]) == (4, 3)
    guard.actions = ["raise", "publish", "rollback"]
    for seed in (13, 14, 15):
        learned(service, learner, seed)
    assert service.events("guard")[-2:] == ["not published: the guard failed: no probes", refused]


def test_numbers_do_not_make_a_refusal_another_one(service: Service) -> None:
    guard = ScriptedGuard(*["rollback"] * 4)
    learner = service.started(chunk=WINDOW, guard=guard)
    for seed, reason in enumerate(("1.25 far", "3.5e+05 far", "17 far", "17 near")):
        guard.reason = reason
        learned(service, learner, seed)
    assert service.events("guard") == ["not published: 1.25 far", "not published: 17 near"]


def test_updates_that_fail_without_end_leave_room_in_the_journal(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = service.started(chunk=WINDOW)
    learned(service, learner, 1)

    def fail(*_arguments: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(learner.adapter, "_step", fail)
    for seed in range(5):
        learned(service, learner, seed)
    assert learner.tally.rollbacks == 5
    assert service.events("rollback") == ["the adapter went back to version 2"]
    service.ask(learner, "rollback", version=1)
    assert service.events("rollback")[1:] == ["the administrator went back to version 1"]


def test_numbers_of_a_refusal_are_shown_until_the_next_look(service: Service) -> None:
    guard = ScriptedGuard("publish", "rollback", "publish", "publish", "reset")
    learner = service.started(chunk=WINDOW, guard=guard)
    for seed, shown in enumerate((True, False, True)):
        learned(service, learner, seed)
        learner._board.publish()
        status = service.status()
        assert status["guard"]["measures"]
        assert bool(status["distances"]) == shown, "they are those of the served model"
        assert status["guard"]["reasons"] == ([] if shown else ["it collapsed"])
    service.ask(learner, "rollback")
    assert (service.status()["guard"]["measures"], service.status()["distances"]) == ({}, {})
    learned(service, learner, 4)
    assert service.status()["guard"]["measures"]
    learned(service, learner, 5)
    assert service.status()["guard"]["measures"]
    assert service.status()["distances"] == {}
    assert service.status()["guard"]["reasons"] == ["it collapsed"]


def test_counts_since_the_start_begin_anew_with_a_process(service: Service) -> None:
    guard = ScriptedGuard("publish", "rollback")
    learner = service.started(chunk=WINDOW, guard=guard)
    for seed in (1, 2):
        learned(service, learner, seed)
    learner.finish()
    zeros = dict.fromkeys(("refused_samples", "bad_samples", "resets"), 0)
    expected = {**zeros, "samples": 2 * WINDOW, "updates": 2, "publishes": 2, "guard_refusals": 1, "rollbacks": 1}
    assert service.status()["since_start"] == expected
    successor = service.started(chunk=WINDOW, guard=ScriptedGuard())
    assert set(service.status()["since_start"].values()) == {0}
    learned(service, successor, 3)
    successor.finish()
    status = service.status()
    assert (status["since_start"]["samples"], status["samples"]) == (WINDOW, 3 * WINDOW)
    assert (status["since_start"]["publishes"], status["counters"]["publishes"]) == (1, 3)


# A guard and methods as they are


def shapes(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Make noisy images of various brightness with one bright quarter, the class."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=generator)
    light, more, noise = (torch.rand(count, *size, generator=generator) for size in ((3, 1, 1), (1, 1, 1), SHAPE))
    images = 0.2 * light + 0.4 * noise
    for number, label in enumerate(labels.tolist()):
        top, left = 8 * (label // 2), 8 * (label % 2)
        images[number, :, top : top + 8, left : left + 8] += 0.1 + 0.2 * more[number]
    return (images * 255).round() / 255, labels


@pytest.fixture(scope="module")
def trained() -> Classifier:
    """Train a network that finds the bright quarter."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers = (nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        classifier = Classifier(nn.Sequential(*layers, nn.Linear(32, CLASSES)), head="5", mean=0, std=1)
    images, labels = shapes(256, seed=0)
    optimiser = torch.optim.Adam(classifier.parameters(), 0.02)
    for _ in range(60):
        optimiser.zero_grad()
        nn.functional.cross_entropy(classifier(images), labels).backward()
        optimiser.step()
    return classifier.eval()


OPTIONS: dict[str, dict[str, Any]] = {
    "bn": {"window": 16},
    "tent": {"window": 16},
    "shot": {"window": 16, "queue": 64},
    "ttac++": {"window": 16, "queue": 64, "passes": 1},
}


@pytest.mark.parametrize("method", OPTIONS)
def test_a_real_guard_lets_methods_publish_on_a_healthy_stream(
    trained: Classifier, method: str, tmp_path: Path
) -> None:
    images, labels = shapes(320, seed=1)
    images = images * 0.9 + 0.05
    stats = SourceStatistics.collect(trained, [shapes(256, seed=0)])
    adapter = adapt(trained, method, stats=stats if method == "ttac++" else None, **OPTIONS[method])
    service = Service(tmp_path, method, classifier=trained)
    learner = service.learner(guard=Guard(trained, stats, GuardOptions(narrow=0.6)), adapter=adapter, chunk=64)
    learner.start()
    service.push(images)
    learn_all(learner)
    tally = learner.tally
    assert (tally.samples, tally.refused_samples, tally.guard_refusals) == (320, 0, 0)
    assert tally.publishes == 6, "the source model, then each chunk"
    with torch.no_grad():
        assert float((adapter.predict(images).argmax(1) == labels).float().mean()) > 0.9
    assert service.status()["guard"]["measures"]["information"]["adapted"] > 0.5
