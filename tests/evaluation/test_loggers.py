"""Curves of a run: what callbacks, TensorBoard's files, a data frame and a progress bar tell of it."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import rich.console
import torch
from rich.console import Console

import ttac
import ttac.benchmark.job
from bench_helpers import InlineExecutor, shared_cache, write_experiment
from ttac import Record, checks
from ttac.cli import main
from ttac.data.labelled import from_tensors
from ttac.data.streams import Domain, Scenario, Stream
from ttac.evaluation import engine
from ttac.evaluation.loggers import MLflow, TensorBoard, WandB

Points = dict[str, list[tuple[int, float]]]  # by name


class Kept:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.points: Points = {}
        self.steps: list[int] = []
        self.closed = 0

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        assert scalars
        assert not self.closed
        self.steps.append(step)
        for name, value in scalars.items():
            self.points.setdefault(name, []).append((step, value))

    def close(self) -> None:
        self.closed += 1


@pytest.fixture(scope="module")
def subject() -> checks.Subject:
    return checks.subject("ttac++")


def stream(subject: checks.Subject, size: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    labels = torch.randint(0, 4, (len(subject.images),), generator=torch.Generator().manual_seed(0))
    return list(zip(subject.images.split(size), labels.split(size), strict=True))


def curves_of(record: Record) -> Points:
    """Give what the record has of the curves, by the names that callbacks get."""
    points: Points = {"error": list(record.cumulative_error)}
    for kind, curve in (("loss", record.losses), ("measure", record.measures)):
        for step, values in curve:
            for name, value in values.items():
                points.setdefault(f"{kind}/{name}", []).append((step, value))
    return points


def test_callbacks_get_the_curves_of_the_record(subject: checks.Subject) -> None:
    kept, other = Kept(), Kept()
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", callbacks=[kept, other])
    seconds = [value for _, value in kept.points.pop("seconds_per_update")]
    assert kept.points == curves_of(record)
    assert any(name.startswith("loss/") for name in kept.points)
    assert sum(seconds) / len(seconds) == pytest.approx(record.update_seconds)
    assert kept.closed == other.closed == 1
    assert other.steps == kept.steps == [8, 16, 24, 32, 40, 44]


def test_passes_are_counted_on(subject: checks.Subject) -> None:
    kept = Kept()
    record = ttac.evaluate(subject.make(), stream(subject), "N-M-SL", epochs=2, callbacks=[kept])
    assert kept.steps == sorted(set(kept.steps))
    assert [step for step, _ in kept.points["error"]] == [2 * 44 + count for count, _ in record.cumulative_error]
    assert max(step for step, _ in kept.points["loss/self_train"]) <= 2 * 44


def test_callbacks_are_closed_where_a_stream_fails(subject: checks.Subject) -> None:
    kept = Kept()
    with pytest.raises(TypeError, match="expected"):
        ttac.evaluate(subject.make(), [*stream(subject)[:2], "no batch"], "N-O-SL", callbacks=[kept])
    assert kept.closed == 1
    assert kept.steps == [8, 16]


def test_callbacks_change_nothing(subject: checks.Subject) -> None:
    plain, watched = (
        ttac.evaluate(subject.make(), stream(subject), "N-O-SL", callbacks=callbacks) for callbacks in ((), [Kept()])
    )
    assert curves_of(plain) == curves_of(watched)


def events(folder: Path) -> Points:
    """Read TensorBoard's files by its own reader."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = reader.EventAccumulator(str(folder), size_guidance={"scalars": 0})
    found.Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}


def assert_same(found: Points, expected: Points) -> None:
    """Compare points that were kept in float32."""
    assert found.keys() == expected.keys()
    for name, points in expected.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points]
        assert [value for _, value in found[name]] == pytest.approx([value for _, value in points], rel=1e-6)


def test_tensorboard_has_every_number(subject: checks.Subject, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="the curves are written by TensorBoard: pip install tensorboard")
    callbacks = [TensorBoard(tmp_path, "one")]
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", callbacks=callbacks)
    found = events(tmp_path / "one")
    assert len(found.pop("seconds_per_update")) == 5
    assert_same(found, curves_of(record))


def test_weights_and_biases_gets_every_number(subject: checks.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, asked = Kept(), []

    def init(**settings: Any) -> SimpleNamespace:
        asked.append(settings)
        return SimpleNamespace(log=lambda scalars, step: kept.on_update(step, scalars), finish=kept.close)

    stub = ModuleType("wandb")
    stub.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", stub)
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", callbacks=[WandB("digits", "first")])
    assert asked == [{"project": "digits", "name": "first"}]
    del kept.points["seconds_per_update"]
    assert kept.points == curves_of(record)
    assert kept.closed == 1


def test_mlflow_gets_every_number(subject: checks.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, asked = Kept(), []
    stub = ModuleType("mlflow")
    stub.set_experiment = lambda name: asked.append(name)  # type: ignore[attr-defined]
    stub.start_run = lambda **settings: asked.append(settings)  # type: ignore[attr-defined]
    stub.log_metrics = lambda scalars, step: kept.on_update(step, scalars)  # type: ignore[attr-defined]
    stub.end_run = kept.close  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mlflow", stub)
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", callbacks=[MLflow("digits")])
    assert asked == ["digits", {"run_name": None, "nested": True}]
    del kept.points["seconds_per_update"]
    assert kept.points == curves_of(record)
    assert kept.closed == 1


@pytest.mark.parametrize(
    ("module", "logger"), [("torch.utils.tensorboard", TensorBoard), ("wandb", WandB), ("mlflow", MLflow)]
)
def test_a_library_that_is_not_there_is_named(
    module: str, logger: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install {module.split('.')[-1]}"):
        logger(tmp_path / "place")
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("word", ["tensorboard", "tensorboard:", "tensorbord:runs"])
@pytest.mark.parametrize("command", ["adapt --model m --images i --out o", "evaluate --model m --out o", "bench order"])
def test_loggers_that_there_are_none_of(command: str, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command.split(), "--log", word]) == 2
    expected = "error: --log must be tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT, not "
    assert capsys.readouterr().err == f"{expected}{word!r}\n"


def test_a_bench_writes_a_folder_for_each_run(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="the curves are written by TensorBoard: pip install tensorboard")
    monkeypatch.setattr(ttac.benchmark.job, "LocalProcesses", InlineExecutor)
    monkeypatch.chdir(tmp_path)
    cache = str(shared_cache(tmp_path_factory))
    words = ["bench", str(write_experiment(tmp_path)), "--cache", cache, "--only", "*-test-*"]
    assert main([*words, "--log", "tensorboard:runs"]) == 0
    names = {path.name for path in (tmp_path / "runs/small/tiny").iterdir()}
    assert names == {f"n-o-sf-test-{name}-c10-c-5-seed-0" for name in ("contrast", "gaussian-noise")}
    for name in names:
        record = Record.load(tmp_path / f"results/small/tiny/{name}.json")
        assert_same(events(tmp_path / f"runs/small/tiny/{name}"), {"error": record.cumulative_error})


# Data frames


def test_a_data_frame_has_every_number(subject: checks.Subject) -> None:
    pandas = pytest.importorskip("pandas", reason="data frames are those of pandas: pip install pandas")
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL")
    table = record.to_pandas()
    expected = curves_of(record)
    assert list(table.columns) == ["samples", *expected]
    for name, points in expected.items():
        told = table[["samples", name]].dropna()
        assert list(zip(told["samples"], told[name], strict=True)) == points
    assert list(table["samples"]) == [8, 16, 24, 32, 40, 44]
    assert pandas.api.types.is_integer_dtype(table["samples"])


def test_a_data_frame_names_the_domain(subject: checks.Subject) -> None:
    pytest.importorskip("pandas", reason="data frames are those of pandas: pip install pandas")
    levels, labels = (255 * subject.images).round().byte(), torch.arange(len(subject.images)) % 4
    domains = [Domain(name, from_tensors(levels[part], labels[part], 4)) for name, part in
               (("fog", slice(0, 20)), ("snow", slice(20, 44)))]  # fmt: skip
    walked = Stream(domains, Scenario("continual", batch=8), prefetch=0)
    record = ttac.evaluate(subject.make(), walked, "N-O-SL")
    table = record.to_pandas()
    assert list(table.columns[:3]) == ["samples", "segment", "error"]
    assert list(table["segment"]) == ["fog" if samples <= 20 else "snow" for samples in table["samples"]]
    assert set(table["segment"]) == set(record.domain_error)
    assert table["error"].iloc[-1] == record.error


def test_a_data_frame_of_passes_has_the_predictions_last(subject: checks.Subject) -> None:
    pytest.importorskip("pandas", reason="data frames are those of pandas: pip install pandas")
    kept = Kept()
    record = ttac.evaluate(subject.make(), stream(subject), "N-M-SL", epochs=2, callbacks=[kept])
    table = record.to_pandas()
    told = table[["samples", "error"]].dropna()
    assert list(zip(told["samples"], told["error"], strict=True)) == kept.points["error"]
    again = ttac.evaluate(adapter := subject.make(), stream(subject), "N-O-SL")
    later = ttac.evaluate(adapter, stream(subject), "N-O-SL", continuing=True)
    assert list(later.to_pandas()["samples"]) == list(again.to_pandas()["samples"])


def test_a_data_frame_without_pandas(subject: checks.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ttac.evaluate(subject.make(), stream(subject)[:1], "N-O-SL")
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"record.to_pandas\(\) needs pandas: pip install pandas"):
        record.to_pandas()


# Progress


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_drawn_where_there_is_somebody_to_see_it(
    terminal: bool, subject: checks.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(engine, "Console", lambda: Console(file=screen, force_terminal=terminal, width=100))
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", progress=True)
    assert "ttac++ under N-O-SL" in screen.getvalue()
    assert f"{record.error:.2f} % error" in screen.getvalue()
    assert ("\x1b" in screen.getvalue()) == terminal
    screen.truncate(0)
    ttac.evaluate(subject.make(), stream(subject), "N-O-SL")
    assert not screen.getvalue().strip("\0")


def test_progress_is_shown_in_a_notebook(subject: checks.Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[str] = []

    class Output:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...
        def clear_output(self, wait: bool) -> None: ...

    def display(what: Any) -> None:
        bundle = getattr(what, "_repr_mimebundle_", lambda *_: {"text/plain": ""})((), ())
        shown.append(bundle["text/plain"])

    stubs = {"IPython": {}, "IPython.display": {"display": display}, "ipywidgets": {"Output": Output}}
    for name, content in stubs.items():
        stub = ModuleType(name)
        vars(stub).update(content)
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.setattr(rich.console, "_is_jupyter", lambda: True)
    record = ttac.evaluate(subject.make(), stream(subject), "N-O-SL", progress=True)
    last = [text for text in shown if text][-1]
    assert "ttac++ under N-O-SL" in last
    assert f"{record.error:.2f} % error" in last
