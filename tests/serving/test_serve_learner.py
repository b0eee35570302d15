"""The learner: what it learns, publishes, refuses and survives."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import SHAPE, WINDOW, ScriptedGuard, Service, learn_all, same
from torch import Tensor
from waiting import until

from ttac.adaptation.adapter import Adapter, Step
from ttac.adaptation.method import Batch
from ttac.serving.learner import Learner


@pytest.fixture
def service(tmp_path: Path) -> Service:
    return Service(tmp_path / "state")


def windows(count: int, seed: int = 5) -> Tensor:
    return torch.rand(count * WINDOW, *SHAPE, generator=torch.Generator().manual_seed(seed))


# What it learns and publishes


@pytest.mark.parametrize("method", ["test", "bn", "tent", "t3a", "ttac++"])
def test_it_learns_as_the_method_alone_and_publishes_what_it_learned(method: str, tmp_path: Path) -> None:
    service = Service(tmp_path, method)
    alone = service.subject.make()
    source = service.weights_of(alone)
    learner = service.started()
    assert service.serve() == (1, source)
    images = service.subject.images
    service.push(images)
    learn_all(learner)
    alone(images)
    assert same(learner.adapter.state_dict(), alone.state_dict())
    version, content = service.serve()
    assert content == service.weights_of(alone) == service.packed(version)
    updates = 0 if method == "test" else 5
    assert (content != source) == (updates > 0)
    assert (learner.tally.samples, learner.tally.updates) == (len(images), updates)
    if method == "t3a":  # not every window has surer samples, and what is served already is no new version
        assert 2 <= version <= 6
    else:
        assert version == 1 + updates
    assert learner.tally.publishes == version
    assert service.events("publish")[0] == "version 1: source model"


def test_publishing_keeps_its_distance_and_what_is_pending_comes_without_samples(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    learner = service.started(publish_every=10.0)
    service.push(windows(4))
    learn_all(learner)
    assert service.serve()[0] == 2, "the first update is published at once, the others have to wait"
    now[0] += 10.0
    assert not learner.turn()
    assert service.serve() == (3, service.weights_of(learner.adapter))
    learner.turn()
    assert service.serve()[0] == 3


def test_old_versions_go_and_the_served_one_stays(service: Service) -> None:
    learner = service.started(keep=2, chunk=WINDOW)
    service.push(windows(6))
    learn_all(learner)
    assert service.folder.versions() == [6, 7]
    assert service.serve() == (7, service.packed(7))


def test_while_paused_nothing_is_taken_and_the_ring_drops_the_oldest(tmp_path: Path) -> None:
    service = Service(tmp_path, buffer=WINDOW)
    learner = service.started(paused=True)
    service.push(windows(2))
    learn_all(learner)
    ring = service.channels.ring
    assert (learner.tally.samples, ring.waiting, ring.dropped) == (0, WINDOW, WINDOW)
    assert service.status()["state"] == "paused"
    assert service.ask(learner, "resume")["ok"]
    learn_all(learner)
    assert learner.tally.samples == WINDOW
    assert service.status()["state"] == "adapting"


# What goes wrong with samples


def test_a_sample_that_the_model_does_not_take_is_passed_over_alone(service: Service) -> None:
    images = windows(3)
    spoilt = images.clone()
    spoilt = torch.cat([spoilt[:7], torch.full((1, *SHAPE), torch.nan), spoilt[7:], torch.full((1, *SHAPE), 200.0)])
    learner = service.started(chunk=WINDOW, guard=ScriptedGuard())
    service.push(spoilt)
    learn_all(learner)
    alone = service.subject.make()
    alone(images)
    assert same(learner.adapter.state_dict(), alone.state_dict())
    assert (learner.tally.bad_samples, learner.tally.samples) == (2, len(images))
    (message,) = service.events("fault")
    assert "NaN" in message


def test_an_update_that_fails_leaves_the_weights_that_are_served(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = service.started(chunk=WINDOW)
    adapter = learner.adapter
    assert isinstance(adapter, Adapter)
    service.push(windows(2))
    learn_all(learner)
    good = adapter.state_dict()
    real, steps = adapter._step, [0]

    def fail(batch: Batch) -> Tensor | None:
        steps[0] += 1
        if steps[0] == 2:
            raise RuntimeError("out of memory")
        return real(batch)

    monkeypatch.setattr(adapter, "_step", fail)
    service.push(windows(1, seed=9))
    learner.turn()
    assert steps[0] == 2
    assert same(adapter.state_dict(), good)
    assert service.serve() == (3, service.weights_of(adapter))
    assert learner.tally.bad_samples == WINDOW
    assert not service.status()["updating"]
    assert service.events("fault", "rollback") == [
        "samples were passed over (8): out of memory",
        "the adapter went back to version 3",
    ]
    service.push(windows(1, seed=9))
    learn_all(learner)
    assert service.serve()[0] == 4


# The guard


def test_what_the_guard_refuses_is_not_published_and_undone(service: Service) -> None:
    learner = service.started(chunk=WINDOW, guard=ScriptedGuard("publish", "rollback", "raise"))
    service.push(windows(1))
    learn_all(learner)
    good, served = learner.adapter.state_dict(), service.serve()
    for seed in (6, 7):
        service.push(windows(1, seed))
        learn_all(learner)
        assert same(learner.adapter.state_dict(), good)
        assert service.serve() == served
        assert service.status()["state"] == "guarded"
    assert service.status()["guard"]["reasons"] == ["the guard failed: no probes"]
    assert service.events("guard") == ["not published: it collapsed", "not published: the guard failed: no probes"]
    service.push(windows(1, 8))
    learn_all(learner)
    assert service.serve()[0] == served[0] + 1
    status = service.status()
    assert (status["state"], status["guard"]["ok"]) == ("adapting", True)
    assert status["guard"]["measures"] == {"entropy": {"adapted": None, "source": 1.0, "limit": None}}
    assert status["distances"]["adapted"] == [0.5, None]


def test_the_guard_can_ask_for_the_source_model_and_it_is_published_once(service: Service) -> None:
    learner = service.started(chunk=WINDOW, guard=ScriptedGuard("publish", "reset", "reset"))
    source = service.serve()[1]
    service.push(windows(3))
    learn_all(learner)
    assert service.serve() == (3, source)
    assert learner.adapter.samples_seen == 0
    assert (learner.tally.resets, learner.tally.guard_refusals) == (2, 2)
    assert service.folder.versions() == [1, 2, 3]


def test_samples_that_the_guard_refuses_are_not_learned_from(service: Service) -> None:
    guard = ScriptedGuard()
    learner = service.started(guard=guard)
    guard.refused = "all samples are alike"
    service.push(windows(2))
    learn_all(learner)
    assert (learner.tally.samples, learner.tally.refused_samples, service.serve()[0]) == (0, 2 * WINDOW, 1)
    assert service.status()["state"] == "guarded"
    guard.refused = None
    service.push(windows(1))
    learn_all(learner)
    assert service.serve()[0] == 2
    assert service.events("guard") == [
        "samples are not learned from: all samples are alike",
        "samples are learned from",
    ]


# Commands


def test_rollback_publishes_earlier_weights_under_a_new_number(service: Service) -> None:
    learner = service.started(chunk=WINDOW)
    service.push(windows(4))
    learn_all(learner)
    reply = service.ask(learner, "rollback", version=2)
    assert (reply["ok"], reply["version"], reply["id"]) == (True, 6, 7)
    assert service.serve() == (6, service.packed(2))
    assert service.weights_of(learner.adapter) == service.packed(2)
    assert learner.adapter.samples_seen == 0
    assert service.events("publish")[-1] == "version 6: weights of version 2"
    # Without a number: the version before, and again the one before that.
    assert service.ask(learner, "rollback")["version"] == 7
    assert service.serve()[1] == service.packed(1)
    last = service.ask(learner, "rollback")
    assert (last["ok"], last["version"]) == (False, 7)
    assert "no earlier version" in last["message"]
    service.push(windows(1, seed=6))
    learn_all(learner)
    assert service.serve() == (8, service.weights_of(learner.adapter))


def test_reset_serves_the_source_model_and_a_kill_does_not_undo_it(service: Service) -> None:
    learner = service.started(chunk=WINDOW)
    service.push(windows(2))
    learn_all(learner)
    learner.save()
    assert service.ask(learner, "reset") == {"id": 7, "ok": True, "message": "the source model is served", "version": 4}
    assert service.serve() == (4, service.packed(1))
    successor = service.started()
    assert same(successor.adapter.state_dict(), service.subject.make().state_dict())
    assert service.serve()[0] == 4


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ({"command": "rollback", "version": 99}, "no version 99"),
        ({"command": "rollback", "version": "2"}, "whole number"),
        ({"command": "rollback", "version": True}, "whole number"),
        ({"command": "rollback", "version": -1}, "no version -1"),
        ({"command": "explode"}, "unknown command: 'explode'"),
        ({"command": None}, "unknown command"),
        ({"command": ["pause"]}, "unknown command"),
        ({}, "unknown command"),
    ],
)
def test_bad_commands_are_answered_and_change_nothing(service: Service, arguments: Any, part: str) -> None:
    learner = service.started()
    service.push(windows(1))
    learn_all(learner)
    before, served = learner.adapter.state_dict(), service.serve()
    service.channels.predictor_end.send(json.dumps({"id": "x", **arguments}).encode())
    learner.turn()
    reply = json.loads(service.channels.predictor_end.recv(65536))
    assert (reply["ok"], reply["id"], reply["version"]) == (False, "x", served[0])
    assert part in reply["message"]
    assert same(learner.adapter.state_dict(), before)
    assert service.serve() == served


def test_malformed_datagrams_are_ignored(service: Service) -> None:
    learner = service.started()
    for text in (b"", b"\xff\x00", b"[1]", b"null", b'{"command": "pause"', b"[" * 60_000, b'"pause"'):
        service.channels.predictor_end.send(text)
    assert service.ask(learner, "snapshot")["ok"]
    assert not learner.paused


def test_commands_whose_answers_nobody_reads_do_not_stop_it(service: Service) -> None:
    learner = service.started()
    for _ in range(2000):
        try:
            service.channels.predictor_end.send(b'{"id": 1, "command": "resume"}')
        except BlockingIOError:
            learner.turn()
    service.push(windows(1))
    learn_all(learner)
    assert service.serve()[0] == 2


# The status


def test_the_status_is_published_during_an_update_and_spans_are_true(tmp_path: Path) -> None:
    service = Service(tmp_path)
    adapter = service.subject.make()
    waits: list[tuple[float, float]] = []
    during: list[dict[str, Any]] = []

    def wait() -> None:
        began, status = time.time(), service.channels.status
        first = status.version + 2  # the one before may have been made up before this
        until(lambda: status.version >= first)
        during.append(service.status())
        waits.append((began, time.time()))

    adapter.before_step = wait
    learner = service.learner(adapter=adapter)
    ended = threading.Event()
    running = threading.Thread(target=learner.run, args=(ended.is_set,))
    pushed = time.time()
    service.push(windows(1))
    running.start()
    try:
        until(lambda: service.channels.status.version > 0 and service.status().get("updates", 0) > 0)
        seen = time.time()
    finally:
        ended.set()
        running.join()
    assert during
    for (began, over), status in zip(waits, during, strict=True):
        assert status["updating"]
        assert began <= status["time"] <= over
    last = service.status()
    ((start, end),) = last["update_spans"]
    assert pushed <= start <= waits[0][0]
    assert waits[-1][1] <= end <= seen
    assert last["updating"] is False
    # Another clock measures it, which need not have the same ticks.
    assert waits[-1][1] - waits[0][0] - 0.01 <= last["update_seconds"] <= end - start + 0.01
    assert (last["version"], last["samples"], last["lag"], last["dropped"]) == (2, WINDOW, 0, 0)
    assert last["snapshot"]["samples"] == WINDOW, "the end of the loop saves all"
    assert last["counters"]["steps"] == learner.adapter.counters()["steps"] > 0
    expected = {"pid", "time", "state", "refused_samples", "updates", "guard", "distances"}
    assert expected <= last.keys()


def test_the_status_has_the_losses_of_the_last_step_that_are_finite(tmp_path: Path) -> None:
    service = Service(tmp_path, "ttac++")
    learner = service.started()
    learner._board.publish()
    assert service.status()["losses"] == {}
    service.push(windows(1))
    learn_all(learner)
    learner._board.publish()
    losses = service.status()["losses"]
    assert losses == {name: float(loss) for name, loss in learner.adapter.last_step.losses.items()} != {}
    service.push(windows(1)[:1])  # which fills no window
    learn_all(learner)
    learner._board.publish()
    assert service.status()["losses"] == losses
    learner._note_updates(
        0.0, Step(update_seconds=[0.1], losses={"a": torch.tensor(2.0), "b": torch.tensor(torch.nan)})
    )
    learner.tell()
    learner._board.publish()
    assert service.status()["losses"] == {"a": 2.0}


def test_a_status_that_is_too_long_goes_without_its_distances(service: Service) -> None:
    learner: Learner = service.started(guard=ScriptedGuard())
    learner._board.set(distances={"adapted": [0.123456789] * 40_000})
    learner._board.publish()
    assert service.status()["distances"] == {}
    assert service.status()["state"] == "adapting"
