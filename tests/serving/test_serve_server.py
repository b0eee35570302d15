"""A whole server in processes of its own: it answers, learns, survives kills, and ends in order."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from server_process import CLASSES, SHAPE, ServerProcess, save_tiny_model

from ttac.model.classifier import Classifier
from ttac.serving.adapter import GIVE_WAY
from ttac.serving.client import InferenceClient
from ttac.serving.state_folder import StateFolder

WINDOW = 16
TENT = ("--method", "tent", "--set", f"window={WINDOW}", "--publish-every", "0", "--snapshot-every", "0")
# Random weights say the same of all that they are shown, which is what a guard is there to stop.
LEARNING = (*TENT, "--no-guard")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.safetensors"
    save_tiny_model(path)
    return path


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    # All versions are kept, so that each answer can be compared with the weights that it names.
    with ServerProcess(model, tmp_path_factory.mktemp("server") / "state", *LEARNING, "--keep", "100000") as running:
        yield running


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).random((count, *SHAPE), np.float32)


def learn(server: ServerProcess, seed: int) -> int:
    """Send windows until a new version answers, and give its number."""
    before = server.status()["version"]
    with InferenceClient(server.url) as client:
        client.infer("tiny", images(4 * WINDOW, seed))
    server.wait_until(lambda: server.status()["version"] > before)
    return int(server.status()["version"])


def logits_of(state: Path, version: int, batch: np.ndarray, model: Path) -> np.ndarray:
    """Compute what the weights of a version say, without the server."""
    from ttac.source.loading import load_model

    classifier: Classifier = load_model(str(model)).classifier
    classifier.model.load_state_dict(StateFolder(state).load_version(version))
    with torch.no_grad():
        return classifier(torch.from_numpy(batch)).numpy()


def test_it_predicts_and_its_versions_move(server: ServerProcess, model: Path) -> None:
    first = learn(server, seed=1)
    second = learn(server, seed=2)
    assert second > first
    batch = images(5, seed=3)
    with InferenceClient(server.url) as client:
        answer = client.infer("tiny", batch, outputs=("logits", "labels"))
    expected = logits_of(server.state, int(answer.version), batch, model)
    np.testing.assert_allclose(answer.outputs["logits"], expected, atol=1e-5)
    np.testing.assert_array_equal(answer.outputs["labels"], expected.argmax(1))
    other = logits_of(server.state, first, batch, model)
    assert np.abs(other - expected).max() > 1e-4, "versions that do not differ would prove nothing"


def test_commands_need_the_token_and_do_what_they_say(server: ServerProcess) -> None:
    request = urllib.request.Request(f"{server.url}/admin/pause", b"{}", method="POST")
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(request, timeout=20)
    assert refused.value.code == 401
    learn(server, seed=4)
    assert server.admin("pause")["version"] > 0
    server.wait_until(lambda: server.status()["adapter"]["state"] == "paused")
    version, lag = server.status()["version"], server.status()["adapter"]["lag"]
    with InferenceClient(server.url) as client:
        client.infer("tiny", images(2 * WINDOW, seed=5))
    server.wait_until(lambda: server.status()["adapter"]["lag"] == lag + 2 * WINDOW)
    assert server.admin("rollback")["version"] == version + 1
    server.wait_until(lambda: server.status()["version"] == version + 1)
    server.admin("resume")
    server.wait_until(lambda: server.status()["adapter"]["lag"] == 0)
    server.admin("reset")
    names = [event["event"] for event in server.get("/events?count=100")["events"]]
    assert {"publish", "pause", "rollback", "resume", "reset", "snapshot"} <= set(names)


def test_after_kills_it_answers_and_learns_on(server: ServerProcess, model: Path) -> None:
    """Every answer during two kills of each process is right for the version it names, and numbers never go back."""
    learn(server, seed=6)
    batch = images(3, seed=7)
    answers: list[tuple[int, np.ndarray]] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            try:
                with InferenceClient(server.url, patience=0) as client:
                    while not ended.is_set():
                        answer = client.infer("tiny", batch, outputs=("logits",))
                        answers.append((int(answer.version), answer.outputs["logits"]))
            except (ConnectionError, OSError):
                continue

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        for names in (("adapter",), ("predictor",), ("predictor", "adapter")):
            before = server.status()
            server.kill(*names)
            for name in names:
                server.wait_until(lambda name=name, pid=before[name]["pid"]: server.status()[name].get("pid") != pid)
            server.wait_until(lambda: server.status()["adapter"]["up"])
            learn(server, seed=8)
    finally:
        ended.set()
        asking.join()
    versions = [version for version, _ in answers]
    assert versions == sorted(versions)
    assert len(set(versions)) > 3
    known: dict[int, np.ndarray] = {}
    for version, found in answers:
        if version not in known:
            known[version] = logits_of(server.state, version, batch, model)
        np.testing.assert_allclose(found, known[version], atol=1e-4)
    restored = [event for event in server.get("/events?count=2000")["events"] if event["event"] == "restore"]
    assert len(restored) >= 2
    assert server.status()["adapter"]["restarts"] == 2
    assert server.status()["predictor"]["restarts"] == 2


def test_a_signal_ends_it_and_the_state_goes_on(model: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    with ServerProcess(model, state, *LEARNING) as server:
        version = learn(server, seed=9)
        seen = server.status()["adapter"]["samples"]
        assert server.stop(signal.SIGTERM) == 0
    assert StateFolder(state).newest() >= version
    assert (state / "token").stat().st_mode & 0o777 == 0o600
    with ServerProcess(model, state, *LEARNING) as server:
        assert server.get("/v2/models/tiny")["versions"] is not None
        assert server.status()["version"] >= version
        server.wait_until(lambda: server.status()["adapter"].get("samples", 0) >= seen)
    log = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
    assert {"predictor", "adapter"} <= {line["process"] for line in log}


def test_the_guard_keeps_what_it_refuses_from_the_model_and_says_so(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path / "state", *TENT) as server, InferenceClient(server.url) as client:
        grey = np.full((4 * WINDOW, *SHAPE), 0.5, np.float32)
        for _ in range(6):
            client.infer("tiny", grey)
        server.wait_until(lambda: server.status()["adapter"].get("refused_samples", 0) > 0)
        server.wait_until(lambda: server.status()["adapter"]["lag"] == 0)
        status = server.status()
        assert status["adapter"]["state"] == "guarded"
        assert not status["guard"]["ok"]
        assert status["guard"]["reasons"]
        assert "guard" in [event["event"] for event in server.get("/events")["events"]]
        with urllib.request.urlopen(server.url + "/metrics", timeout=20) as answer:
            assert "ttac_guard_ok 0.0" in answer.read().decode()


def test_all_threads_of_the_adapter_give_way(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "wide.safetensors", width=32)  # so that torch has work for several threads in loading it
    arguments = (*LEARNING, "--threads-adapt", "2")
    with ServerProcess(tmp_path / "wide.safetensors", tmp_path / "state", *arguments) as server:
        threads = Path(f"/proc/{server.status()['adapter']['pid']}/task")

        def niceness_of_those_that_work() -> list[int]:
            stats = [(thread / "stat").read_text().rpartition(")")[2].split() for thread in threads.iterdir()]
            # By their time in hundredths of a second; one only waits for the server's end.
            return [int(fields[16]) for fields in stats if int(fields[11]) + int(fields[12]) > 0]

        seeds = count(11)

        def several_work() -> bool:
            learn(server, next(seeds))
            return len(niceness_of_those_that_work()) > 1

        server.wait_until(several_work)
        assert set(niceness_of_those_that_work()) == {min(19, os.nice(0) + GIVE_WAY)}  # below whoever runs the tests


def test_who_comes_while_it_ends_is_refused_at_once(model: Path, tmp_path: Path) -> None:
    with ServerProcess(model, tmp_path / "state", *LEARNING) as server:
        assert (tmp_path / "state").stat().st_mode & 0o777 == 0o700, "it keeps images of clients"
        adapter = server.status()["adapter"]["pid"]
        os.kill(adapter, signal.SIGSTOP)  # an update that takes long
        try:
            server.process.send_signal(signal.SIGTERM)
            until = time.monotonic() + 20
            while time.monotonic() < until:
                try:
                    socket.create_connection(("127.0.0.1", server.port), timeout=5).close()
                except ConnectionRefusedError:
                    break
                time.sleep(0.05)
            else:
                pytest.fail("the port stays open")
            assert server.process.poll() is None
        finally:
            os.kill(adapter, signal.SIGCONT)
        assert server.process.wait(60) == 0


def test_a_model_that_changes_on_disk_does_not_mix_with_what_was_learned(tmp_path: Path) -> None:
    model = tmp_path / "tiny.safetensors"
    save_tiny_model(model)
    with ServerProcess(model, tmp_path / "state", *LEARNING) as server:
        learn(server, seed=12)
        before = model.read_bytes()
        save_tiny_model(model, seed=1)
        server.kill("adapter")
        server.wait_until(lambda: "the model's file has changed while it is served" in server.log.read_text())
        assert not list((tmp_path / "state").glob("*damaged*"))
        assert server.get("/v2/health/ready") is not None
        model.write_bytes(before)
        learn(server, seed=13)
        events = [event["event"] for event in server.get("/events?count=1000")["events"]]
        assert "restore" in events


def test_a_signal_right_at_the_start_ends_it(model: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "token").touch()  # of a start that was killed between making it and filling it
    server = ServerProcess(model, tmp_path / "state", *LEARNING)
    try:
        server.wait_until(lambda: "page at" in server.log.read_text())
        assert server.stop(signal.SIGINT) == 0
    finally:
        server.end()
    assert (tmp_path / "state" / "token").read_text().strip()
    assert "#token" not in server.log.read_text(), "a log is no place for a secret"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--method", "nonsense"), "nonsense"),
        (("--method", "t3a"), "add --no-guard"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_served(
    model: Path, tmp_path: Path, arguments: tuple[str, ...], reason: str
) -> None:
    command = [sys.executable, "-m", "ttac", "serve", "--model", str(model), "--state", str(tmp_path / "state")]
    ended = subprocess.run([*command, "--port", "0", *arguments], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert reason in ended.stderr
    assert ended.stderr.startswith("error: ")


def test_classes_are_named(server: ServerProcess) -> None:
    assert server.status()["classes"] == list(CLASSES)
