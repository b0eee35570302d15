"""`ttac adapt` after interruptions: the same bytes, and nothing of another run is touched."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from adapt_helpers import RESULTS, command, contents, interrupt_at, make_world

from ttac.cli import main
from ttac.evaluation.records import Record


@pytest.fixture
def world(tmp_path: Path) -> Path:
    return make_world(tmp_path)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_the_batch_and_the_same_command_goes_on(
    signum: signal.Signals,
    code: int,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(command(world, "whole")) == 0
    rarely = ("--checkpoint-every", "1000")
    with monkeypatch.context() as patched:
        interrupt_at(4, lambda: signal.raise_signal(signum), patched)
        assert main(command(world, "parts", *rarely)) == code
    assert "stopped after 19 images; the same command goes on from there" in capsys.readouterr().err
    assert not (world / "parts/predictions.csv").exists()
    assert main(command(world, "parts", *rarely)) == 0
    assert "going on after 19 images" in capsys.readouterr().out
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name
    whole, parts = (Record.load(world / name / "record.json") for name in ("whole", "parts"))
    assert (parts.samples, parts.counters) == (whole.samples, whole.counters)
    for key in ("unreadable", "updates", "settings", "arrival_batch_sizes", "reset"):
        assert parts.provenance[key] == whole.provenance[key], key
    assert (whole.provenance["continued_at"], parts.provenance["continued_at"]) == ([], [19])


def test_a_second_signal_ends_at_once_and_the_last_checkpoint_counts(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "whole")) == 0

    def twice() -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched:
        interrupt_at(6, twice, patched)
        assert main(command(world, "parts")) == 130
    assert "stopped at once" in capsys.readouterr().err
    assert main(command(world, "parts")) == 0
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("test", []),
        ("bn", ["--set", "window=8"]),
        ("tent", ["--set", "window=8"]),
        ("ttac", ["--set", "window=8", "--set", "queue=0", "--set", "passes=1"]),
    ],
)
def test_every_method_goes_on_after_a_crash_wherever_it_comes(
    method: str, options: list[str], world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(out: str) -> int:
        arguments = command(world, out)[: command(world, out).index("--set")]
        return main([*arguments, "--method", method, *options, "--checkpoint-every", "0"])

    def crash() -> None:
        raise KeyboardInterrupt

    assert run("whole") == 0
    for call in (1, 2, 3):
        with monkeypatch.context() as patched:
            interrupt_at(call, crash, patched)
            assert run("parts") == 130
    assert run("parts") == 0
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name


def test_a_killed_process_goes_on_from_its_last_checkpoint(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "whole")) == 0
    code = (
        "import os, signal, sys\n"
        "from ttac.cli import main\n"
        "from ttac.evaluation.engine import StreamWalk\n"
        "give, calls = StreamWalk._give, iter(range(99))\n"
        "def giving(*given):\n"
        "    logits = give(*given)\n"
        "    if next(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return logits\n"
        "StreamWalk._give = giving\n"
        "main(sys.argv[1:])\n"
    )
    # As many threads as here, because sums that are split among threads are added in another order.
    environment = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run(
        [sys.executable, "-c", code, *command(world, "parts")], check=False, env={**os.environ, **environment}
    )
    assert killed.returncode == -signal.SIGKILL
    with (world / "parts/predictions.csv.part").open("ab") as table:
        table.write(b"half a li")  # what is behind the last checkpoint does not count
    assert main(command(world, "parts")) == 0
    assert "going on after 19 images" in capsys.readouterr().out
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name


def test_a_death_while_results_are_written_is_mended(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(command(world, "whole")) == 0
    replace = Path.replace
    for name in ("adapted.safetensors", "record.json", "predictions.csv"):

        def dies(self: Path, target: Path, name: str = name) -> Path:
            if Path(target).name == name:
                raise KeyboardInterrupt
            return replace(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "replace", dies)
            assert main(command(world, "parts")) == 130
        assert not (world / "parts/predictions.csv").exists()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda self, missing_ok=False: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(command(world, "parts")) == 130
    assert main(command(world, "parts")) == 0
    assert contents(world / "parts").keys() == contents(world / "whole").keys()
    for name in RESULTS:
        assert (world / "parts" / name).read_bytes() == (world / "whole" / name).read_bytes(), name


def test_a_complete_folder_is_left_alone(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(world, "out")) == 0
    before = contents(world / "out")
    with monkeypatch.context() as patched:
        interrupt_at(1, lambda: pytest.fail("it was computed again"), patched)
        assert main(command(world, "out")) == 0
    assert "is complete: nothing to do" in capsys.readouterr().out
    assert contents(world / "out") == before


@pytest.mark.parametrize("complete", [True, False])
@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--batch", "6"], "batch: 5 there, 6 now"),
        (["--set", "passes=2"], "'passes': 2} now"),
        (["--method", "ttac"], r"method: ttac++ there, ttac now"),
        (["--size", "20"], "size: [16, 16] there, [20, 20] now"),
        (["--mean", "0.5"], "model: "),
        (["--preset", "paper"], "preset: None there, paper now"),
    ],
)
def test_other_settings_are_refused_and_nothing_changes(
    complete: bool,
    more: list[str],
    message: str,
    world: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(10**5 if complete else 3, lambda: signal.raise_signal(signal.SIGINT), patched)
        assert main(command(world, "out")) == (0 if complete else 130)
    before = contents(world / "out")
    assert main(command(world, "out", *more)) == 2
    said = capsys.readouterr().err
    assert "is of another run" in said
    assert message in said
    assert contents(world / "out") == before


def test_a_changed_listing_is_refused(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        interrupt_at(3, lambda: signal.raise_signal(signal.SIGINT), patched)
        assert main(command(world, "out")) == 130
    (world / "images/42.png").rename(world / "images/43.png")
    assert main(command(world, "out")) == 2
    assert "is of another run (images: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["predictions.csv", "adapted.safetensors", "record.json", "progress.pt"])
def test_results_of_something_else_are_not_overwritten(
    name: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "out").mkdir()
    (world / "out" / name).write_text("precious")
    assert main(command(world, "out")) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "of something else: choose another --out" in said or "is damaged, delete" in said
    assert contents(world / "out") == {name: b"precious"}


def test_two_processes_do_not_share_a_folder(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = []
    with monkeypatch.context() as patched:
        interrupt_at(3, lambda: codes.append(main(command(world, "out"))), patched)
        assert main(command(world, "out")) == 0
    assert codes == [2]
    assert "another process is writing to" in capsys.readouterr().err
