"""What a server is refused with before it begins."""

from __future__ import annotations

import math
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from server_process import save_tiny_model

from ttac.evaluation.spec import MethodSpec, ModelSpec
from ttac.serving.prepare import prepare
from ttac.serving.settings import ServeJob, read_token, usable_cores
from ttac.serving.supervisor import LONGEST_PAUSE, PAUSE, Child, forked


def job(tmp_path: Path, *, options: dict[str, Any] | None = None, **settings: Any) -> ServeJob:
    path = tmp_path / "tiny.safetensors"
    if not path.exists():
        save_tiny_model(path)
    method = MethodSpec(settings.pop("method", "ttac++"), settings.pop("preset", None), options or {})
    return ServeJob(ModelSpec(str(path)), method, state=tmp_path / "state", **settings)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"max_waiting": 1}, "--max-waiting"),
        ({"name": "a/b"}, "--name"),
        ({"name": ".."}, "--name"),
        ({"timeout": math.inf}, "timeout"),
        ({"timeout": 0.0}, "timeout"),
        ({"batch_wait_ms": math.nan}, "batch_wait_ms"),
        ({"port": 70000}, "port"),
        ({"buffer": 0}, "buffer"),
        ({"guard_narrow": 2.0}, "guard_narrow"),
        ({"allow_host": ("example.com:80",)}, "--allow-host"),
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        job(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"method": "tent", "options": {"window": 1}}, "window must be at least 2"),
        ({"device_adapt": "cuda:99"}, "cannot be used"),
        ({"device_predict": "nonsense"}, "cannot be used"),
        ({"method": "t3a"}, "add --no-guard"),
    ],
)
def test_models_and_methods_that_cannot_be_served(tmp_path: Path, settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        prepare(job(tmp_path, **settings))


def test_a_method_with_a_fast_preset_is_served_with_it(tmp_path: Path) -> None:
    assert job(tmp_path).prepare_method().spec.preset == "fast"
    assert job(tmp_path, preset="paper").prepare_method().spec.preset == "paper"
    assert job(tmp_path, method="tent").prepare_method().spec.preset is None


def test_what_is_not_said_follows_from_the_rest(tmp_path: Path) -> None:
    made = job(tmp_path, device_adapt="meta", max_body_mib=0.5)
    assert made.served_name == "tiny"
    assert (made.predict_on, made.adapt_on) == ("cpu", "meta")
    assert made.max_body == 2**19
    assert made.token is None


def test_what_is_right_is_told(tmp_path: Path) -> None:
    facts = prepare(job(tmp_path, method="bn"))
    assert facts.shape == (3, 16, 16)
    assert facts.identity["method"] == "bn"
    assert "device" not in facts.identity


def test_a_token_is_one_word(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("secret\n")
    assert read_token(file) == job(tmp_path, token_file=file).token == "secret"
    assert read_token(None) is None
    for text in ("", "two words\n"):
        file.write_text(text)
        with pytest.raises(ValueError, match="one token"):
            read_token(file)


def test_the_pause_grows_while_nothing_gets_done() -> None:
    done = [0]
    child = Child("child", lambda failures: None, lambda: done[0])
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
        process = forked(lambda code=code: sys.exit(code))
        process.join()
        assert process.exitcode == code
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & {signal.SIGTERM}, "signals come through again"
