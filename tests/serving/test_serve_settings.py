"""What a server is refused with before it begins."""

from __future__ import annotations

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from server_process import save_tiny_model

from ttac.cli.serve import read_token, usable_cores
from ttac.serving.prepare import prepare
from ttac.serving.settings import ServeJob
from ttac.serving.supervisor import LONGEST_PAUSE, PAUSE, Child, forked
from ttac.source.loading import load_model


def job(tmp_path: Path, **settings: Any) -> ServeJob:
    path = tmp_path / "tiny.safetensors"
    if not path.exists():
        save_tiny_model(path)
    return ServeJob(lambda device: load_model(str(path), device=device), tmp_path / "state", **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"max_waiting": 1}, "must hold a batch"),
        ({"name": "a/b"}, "part of an address"),
        ({"name": ".."}, "part of an address"),
        ({"timeout": math.inf}, "number of seconds"),
        ({"timeout": 0.0}, "more than 0"),
        ({"batch_wait": math.nan}, "number of seconds"),
        ({"port": 70000}, "0..65535"),
        ({"buffer": 0}, "at least 1"),
        ({"hosts": ("Model.Example.com",)}, "model.example.com"),
        ({"hosts": ("example.com:80",)}, "model.example.com"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        job(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "tent", "options": {"window": 1}}, "window must be at least 2"),
        ({"device_adapt": "cuda:99"}, "cannot be used"),
        ({"device_predict": "nonsense"}, "cannot be used"),
        ({"method": "t3a"}, "add --no-guard"),
        ({"method": "bn", "guard_narrow": 2.0}, "narrow must be in"),
    ],
)
def test_models_and_methods_that_cannot_be_served(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare(job(tmp_path, **settings))


def test_a_method_with_a_fast_preset_is_served_with_it(tmp_path: Path) -> None:
    assert job(tmp_path).choice("cpu").preset == "fast"
    assert job(tmp_path, preset="paper").choice("cpu").preset == "paper"
    assert job(tmp_path, method="tent").choice("cpu").preset is None


def test_what_is_right_is_told(tmp_path: Path) -> None:
    facts = prepare(job(tmp_path, method="bn"))
    assert facts.shape == (3, 16, 16)
    assert facts.identity["method"] == "bn"
    assert "device" not in facts.identity


def test_a_token_is_one_word(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert read_token(file) == "secret"
    for text in ("", "two words\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="one token"):
            read_token(file)


def test_the_pause_grows_while_nothing_gets_done() -> None:
    done = [0]
    child = Child("child", lambda failures: 0, lambda: done[0])
    assert child.plan_restart() == PAUSE
    assert [child.plan_restart() for _ in range(3)] == pytest.approx([2 * PAUSE, 4 * PAUSE, 8 * PAUSE])
    assert child.failures == 3
    done[0] += 1
    assert child.plan_restart() == PAUSE
    for _ in range(30):
        assert child.plan_restart() <= LONGEST_PAUSE


def test_a_container_has_as_many_cores_as_it_may_use(tmp_path: Path) -> None:
    limit = tmp_path / "cpu.max"
    all_of_them = usable_cores(limit)
    assert all_of_them >= 1
    for text, cores in (
        ("max 100000\n", all_of_them),
        ("nonsense", all_of_them),
        ("50000 100000\n", 1),
        ("150000 100000\n", min(2, all_of_them)),
        ("99900000 100000\n", all_of_them),
    ):
        limit.write_text(text)
        assert usable_cores(limit) == cores


def test_a_fork_ends_with_the_code_that_it_gives() -> None:

    for code in (0, 3):
        pid = forked(lambda code=code: code)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM}, "signals come through again"
