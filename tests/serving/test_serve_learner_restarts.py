"""Learners that are killed, and their successors: nothing is lost, and a number names the same weights for ever."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from learner_helpers import SHAPE, WINDOW, ScriptedGuard, Service, learn_all, same
from test_serve_state_folder import files_limited_to
from torch import Tensor
from waiting import until

from ttac.adaptation.adapter import Adapter
from ttac.serving.learner import Learner


def windows(count: int, seed: int = 5) -> Tensor:
    return torch.rand(count * WINDOW, *SHAPE, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("method", ["bn", "tent", "ttac++"])
def test_a_successor_ends_where_an_uninterrupted_learner_does(method: str, tmp_path: Path) -> None:
    whole, broken = Service(tmp_path / "whole", method), Service(tmp_path / "broken", method)
    for service in (whole, broken):
        service.push(windows(6))
    uninterrupted = whole.started()
    learn_all(uninterrupted)

    first = broken.started()
    for _ in range(3):
        first.turn()
    first.save()
    saved, position = first.adapter.state_dict(), broken.channels.ring.position
    for _ in range(4):
        first.turn()
    assert broken.channels.ring.position > position
    assert not same(first.adapter.state_dict(), saved)
    second = broken.started()  # the first one is left as a kill leaves it
    assert same(second.adapter.state_dict(), saved)
    assert broken.channels.ring.position == position
    assert second.tally.samples == position
    learn_all(second)
    assert same(second.adapter.state_dict(), uninterrupted.adapter.state_dict())
    assert broken.serve()[1] == whole.serve()[1]
    assert second.tally.samples == uninterrupted.tally.samples == 6 * WINDOW
    assert broken.events("restore") == ["the adapter goes on from version 2 and the snapshot after 15 samples"]


def test_samples_before_the_first_snapshot_of_a_process_are_learned_again_too(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.started()
    service.push(windows(2))
    learn_all(service.started())
    successor = service.started()
    learn_all(successor)
    assert successor.tally.samples == 2 * WINDOW


def test_the_guard_goes_on_too_and_a_pause_outlasts_the_process_and_the_server(tmp_path: Path) -> None:
    service = Service(tmp_path)
    learner = service.started(guard=ScriptedGuard())
    service.push(windows(1))
    learn_all(learner)
    assert service.ask(learner, "pause")["ok"]
    guard = ScriptedGuard()
    assert service.started(guard=guard).paused
    assert guard.seen == WINDOW
    assert len(service.events("pause")) == 1
    service.new_memory()
    successor = service.started(guard=ScriptedGuard())
    assert successor.paused
    assert "still paused" in service.events("pause")[-1]
    assert service.status()["state"] == "paused"
    assert service.ask(successor, "resume")["ok"]
    service.new_memory()
    assert not service.started(guard=ScriptedGuard()).paused


def test_who_asks_for_a_pause_gets_one_at_each_start_of_the_server_alone(tmp_path: Path) -> None:
    service = Service(tmp_path)
    assert service.ask(service.started(paused=True), "resume")["ok"]
    assert not service.started(paused=True).paused, "a process that died"
    service.new_memory()
    assert service.started(paused=True).paused


def test_waiting_samples_can_be_skipped_and_no_successor_goes_back_to_them(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.started()
    service.push(windows(2))
    service.started(skip_waiting=True)
    assert service.channels.ring.waiting == 0
    successor = service.started()  # the one before is left as a kill leaves it
    assert not successor.turn()
    assert successor.tally.samples == 0


@pytest.mark.parametrize("kept", ["snapshot of before", "no snapshot", "snapshot without a guard"])
def test_the_guard_knows_what_is_served_whatever_is_gone_on_from(tmp_path: Path, kept: str) -> None:
    service = Service(tmp_path)
    learner = service.started(guard=None if kept == "snapshot without a guard" else ScriptedGuard(), chunk=WINDOW)
    service.push(windows(2))
    learn_all(learner)
    if kept == "snapshot without a guard":
        learner.save()
    elif kept == "no snapshot":
        service.folder.snapshot.unlink()
    guard = ScriptedGuard()
    service.started(guard=guard)
    (told,) = guard.told
    assert told is not None
    assert bytes(service.layout.pack(told)) == service.serve()[1] == service.packed(3)


def test_new_memory_gets_the_newest_version_under_its_own_number(tmp_path: Path) -> None:
    service = Service(tmp_path)
    learner = service.started()
    service.push(windows(3))
    learn_all(learner)
    learner.finish()
    served, state = service.serve(), learner.adapter.state_dict()
    assert served[0] == 4
    service.new_memory()
    service.push(windows(3, seed=8))  # before the adapter is there; positions of the old memory mean nothing here
    successor = service.started()
    assert service.serve() == served
    assert same(successor.adapter.state_dict(), state)
    assert service.channels.ring.waiting == 3 * WINDOW
    learn_all(successor)
    assert service.serve()[0] == 7
    assert successor.tally.samples == 6 * WINDOW


# Kills between two instructions


class Killed(BaseException):
    """Ends a learner where it is; nothing may handle it."""


def killed_at(service: Service, monkeypatch: pytest.MonkeyPatch, target: object, name: str) -> Learner:
    """Learn until a function is called, and end there."""

    def kill(*_arguments: object, **_fields: object) -> None:
        raise Killed

    learner = service.started()
    service.push(windows(1))
    with monkeypatch.context() as patch:
        patch.setattr(target, name, kill)
        with pytest.raises(Killed):
            learn_all(learner)
    return learner


@pytest.mark.parametrize("place", ["before the file", "before the slots", "after the slots"])
def test_a_kill_while_publishing_never_gives_a_number_twice(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path)
    target: tuple[object, str] = {
        "before the file": (service.folder, "save_version"),
        "before the slots": (service.channels.weights, "publish"),
        "after the slots": (service.folder, "prune"),
    }[place]
    learner = killed_at(service, monkeypatch, *target)
    learned = service.weights_of(learner.adapter)
    served = service.serve()[0]
    assert served == (2 if place == "after the slots" else 1)
    successor = service.started()
    if place == "before the slots":
        assert service.serve() == (2, learned), "what is on disk under a number is served under it"
    learn_all(successor)  # the window again, with the same result
    version, content = service.serve()
    assert (version, content) == (2, learned)
    service.push(windows(1, seed=9))
    learn_all(successor)
    assert service.serve() == (3, service.packed(3))
    assert service.packed(2) == learned


def test_a_number_stays_taken_when_its_file_is_damaged(tmp_path: Path) -> None:
    service = Service(tmp_path)
    learner = service.started()
    service.push(windows(2))
    learn_all(learner)
    good = service.packed(2)
    service.folder.snapshot.unlink()
    (tmp_path / "versions" / "00000003.safetensors").write_bytes(b"nothing")
    service.new_memory()
    successor = service.started()
    assert service.serve() == (2, good)
    assert service.weights_of(successor.adapter) == good
    assert any("version 3 was put aside" in message for message in service.events("fault"))
    service.folder.snapshot.unlink()
    service.new_memory()
    successor = service.started()  # which has nothing but the name of the file to know it from
    service.push(windows(1, seed=9))
    learn_all(successor)
    assert service.serve()[0] == 4


# Damage and full disks


@pytest.mark.parametrize("damage", ["torn", "other method", "forged number", "missing part"])
def test_a_damaged_snapshot_is_put_aside_and_the_newest_version_goes_on(tmp_path: Path, damage: str) -> None:
    service = Service(tmp_path)
    learner = service.started(guard=ScriptedGuard())
    service.push(windows(2))
    learn_all(learner)
    learner.save()
    content = service.folder.load_snapshot()
    assert content is not None
    if damage == "torn":
        service.folder.snapshot.write_bytes(service.folder.snapshot.read_bytes()[:5000])
    elif damage == "missing part":
        del content["adapter"]["state"]["memory"]
        service.folder.save_snapshot(content)
    else:
        changes = {"adapter": {"method": "bn"}} if damage == "other method" else {"version": "7"}
        service.folder.save_snapshot(content | changes)
    guard = ScriptedGuard()
    successor = service.started(guard=guard)
    assert (tmp_path / "snapshot.damaged.pt").exists()
    assert any("the snapshot was put aside" in message for message in service.events("fault"))
    assert service.weights_of(successor.adapter) == service.packed(3) == service.serve()[1]
    assert (successor.adapter.samples_seen, guard.seen) == (0, 0)
    service.push(windows(1, seed=9))
    learn_all(successor)
    assert service.serve()[0] == 4


@pytest.mark.parametrize("problem", ["disk", "memory"])
def test_a_snapshot_that_cannot_be_read_now_is_left_for_the_next_process(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(tmp_path)
    learner = service.started()
    service.push(windows(2))
    learn_all(learner)
    learner.save()
    saved = service.folder.snapshot.read_bytes()
    real, failed = Adapter._restore, []

    def unreadable(_path: Path) -> bytes:
        raise OSError(5, "Input/output error")

    def too_large(adapter: Adapter, state: dict[str, Any]) -> None:
        if failed:  # what was before is loaded again
            return real(adapter, state)
        failed.append(adapter)
        raise MemoryError

    with monkeypatch.context() as patch:
        if problem == "disk":
            patch.setattr(Path, "read_bytes", unreadable)
        else:
            patch.setattr(Adapter, "_restore", too_large)
        # The adapter says of every error on its way that the state is damaged.
        with pytest.raises((OSError, ValueError), match=r"Input/output error|MemoryError"):
            service.started()
    assert service.folder.snapshot.read_bytes() == saved
    assert not (tmp_path / "snapshot.damaged.pt").exists()
    assert same(service.started().adapter.state_dict(), learner.adapter.state_dict())


def test_a_state_of_another_identity_is_refused_and_left_alone(tmp_path: Path) -> None:
    service = Service(tmp_path)
    service.started(identity={"method": "tent", "lr": 0.1})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=r"lr: 0.1 there, 0.2 now.*another --state, or delete it"):
        service.started(identity={"method": "tent", "lr": 0.2})
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_on_a_full_disk_it_learns_on_and_publishes_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ttac.serving.releases.RETRY", 0.0)
    service = Service(tmp_path)
    learner = service.started(snapshot_every=0.0)
    served = service.serve()
    service.push(windows(2))
    with files_limited_to(service.folder.events.stat().st_size + 4000):
        learn_all(learner)
        assert service.serve() == served
        assert not service.ask(learner, "snapshot")["ok"]
        reply = service.ask(learner, "reset")
        assert (reply["ok"], reply["version"]) == (False, 1), "the source model is served already, and not saved"
        assert "could not be saved, and a restart would undo it" in reply["message"]
        assert not service.ask(learner, "pause")["ok"]
        assert service.ask(learner, "resume")["message"].startswith("done, but it could not be saved")
    assert not list(tmp_path.rglob("*.part"))
    assert learner.tally.samples == 2 * WINDOW
    faults = service.events("fault")
    assert any("a version could not be written" in message for message in faults)
    assert any("the snapshot could not be written" in message for message in faults)
    assert len(faults) == 2, "each kind once, however often it is tried"
    service.push(windows(1, seed=9))
    learn_all(learner)
    version, content = service.serve()
    assert content == service.weights_of(learner.adapter) == service.packed(version)
    assert same(service.started().adapter.state_dict(), learner.adapter.state_dict())


def test_a_server_that_begins_on_a_full_disk_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ttac.serving.releases.RETRY", 0.0)
    service = Service(tmp_path)
    service.push(windows(1))
    with files_limited_to(0):
        learner = service.started()
        learn_all(learner)
        assert service.channels.weights.version == 0
    learner.turn()
    version, content = service.serve()
    assert content == service.weights_of(learner.adapter) == service.packed(version)


def test_getting_on_is_what_learners_do_and_not_what_is_written_over(tmp_path: Path) -> None:
    service = Service(tmp_path, buffer=2 * WINDOW)
    learner = service.started(chunk=WINDOW)

    def progress() -> int:
        return int(service.channels.progress.sum())

    service.push(windows(4))  # two of them are written over
    assert progress() == 0
    learner.turn()
    first = progress()
    assert first > 0
    successor = service.started(chunk=WINDOW)  # goes back to the snapshot, with the samples that are left
    successor.turn()
    assert progress() == first, "it has learned nothing that was not learned before"
    successor.turn()
    assert progress() > first
    before = progress()
    assert not successor.turn()
    assert progress() == before + 1, "all is learned"


# Kills of processes


def forked_learner(service: Service) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)
        service.learner(snapshot_every=0.0).run(lambda: False)
    finally:
        os._exit(1)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let this process add numbers in the order in which its forks do."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_ten_kills_lose_nothing_and_mix_nothing_up(tmp_path: Path) -> None:
    service = Service(tmp_path / "state")
    chance = random.Random(0)
    images = windows(22)
    rounds = images.split(2 * WINDOW)
    named: dict[int, str] = {}

    def note(version: int, content: bytes) -> None:
        mark = hashlib.sha256(content).hexdigest()
        assert named.setdefault(version, mark) == mark, f"version {version} names two weights"

    for kill in range(10):
        ring, before = service.channels.ring, service.channels.weights.version
        service.push(rounds[kill])
        pid = forked_learner(service)
        try:
            until(lambda before=before: service.channels.weights.version > before)  # type: ignore[misc]
            time.sleep(chance.random() * 0.1)
        finally:
            os.kill(pid, signal.SIGKILL)
            assert os.WIFSIGNALED(os.waitpid(pid, 0)[1])
        saved = service.folder.load_snapshot()
        assert saved is not None
        assert saved["tally"]["samples"] == saved["position"] <= ring.position
        assert saved["adapter"]["state"]["samples_seen"] == saved["position"]
        version, content = service.serve()
        assert content == service.packed(version)
        note(version, content)
        for found in service.folder.versions():
            note(found, service.packed(found))
    service.push(rounds[10])
    last = service.started(publish_every=0.0)
    learn_all(last)
    note(*service.serve())
    alone = service.subject.make()
    alone(images)
    assert same(last.adapter.state_dict(), alone.state_dict())
    assert last.tally.samples == len(images)
    assert service.serve()[1] == service.weights_of(alone)
    assert len(service.events("start", "restore")) == 11
    assert not list(service.folder.path.rglob("*.part"))
