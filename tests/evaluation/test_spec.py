"""Specs: what they become, and which mistakes show before anything takes long."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ttac.evaluation.prepare import PreparedMethod, PreparedRun, read_options
from ttac.evaluation.protocols import ProtocolError
from ttac.evaluation.spec import MethodSpec, ModelSpec, RunSpec, StreamSpec
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, save_model
from ttac.source.statistics import SourceStatistics

SMALL = MethodSpec(options={"window": "16", "queue": 0, "passes": "1"})
STREAM = StreamSpec(corruption=("gaussian_noise",), samples=32, batch=16, seed=7)


@pytest.fixture
def model(tmp_path: Path) -> ModelSpec:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 10, channels=1, width=4, stem_stride=2)
    path = tmp_path / "model.safetensors"
    options = {"width": 4, "stem_stride": 2}
    classes = tuple(map(str, range(10)))
    save_model(
        path,
        network,
        ModelDescription(
            "resnet8", 10, 1, size=(32, 32), classes=classes, arch_options=options, mean=(0.0,), std=(1.0,)
        ),
    )
    return ModelSpec(str(path))


@pytest.fixture
def no_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SourceStatistics, "infer", lambda *_, **__: pytest.fail("minutes went into statistics"))


def quiet() -> Console:
    return Console(quiet=True)


def test_a_run_is_settled_by_its_spec(model: ModelSpec) -> None:
    spec = RunSpec(model, SMALL, STREAM)
    run, again = PreparedRun(spec), PreparedRun(spec)
    assert run.settings == again.settings
    assert run.settings["options"] == {"seed": 7, "window": 16, "queue": 0, "passes": 1}
    assert {name: run.settings[name] for name in ("sequence", "samples", "batch", "seed", "protocol", "epochs")} == {
        "sequence": "single",
        "samples": 32,
        "batch": 16,
        "seed": 7,
        "protocol": "N-O-SF",
        "epochs": None,
    }
    record = run.evaluate(run.method.adapter(quiet()), lambda outcome: None, notes={"run": "first"})
    assert record.error == again.evaluate(again.method.adapter(quiet()), lambda outcome: None).error
    assert (record.provenance["settings"], record.provenance["run"]) == (run.settings, "first")
    other = PreparedRun(replace(spec, stream=replace(STREAM, corruption_seed=8)))
    assert other.settings["data"] != run.settings["data"]


def test_the_models_description_follows_the_spec(model: ModelSpec, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("\n".join("abcdefghij"))
    loaded = replace(model, size=24, classes=tmp_path / "names.txt").load()
    assert loaded.description.size == (24, 24)
    assert loaded.description.classes == tuple("abcdefghij")


@pytest.mark.usefixtures("no_inference")
@pytest.mark.parametrize(
    ("method", "protocol"),
    [
        (MethodSpec(options={"window": 1}), "N-O-SF"),
        (MethodSpec(options={"windo": 16}), "N-O-SF"),
        (MethodSpec(preset="papper"), "N-O-SF"),
        (MethodSpec(), "Y-O-SL"),
    ],
)
def test_mistakes_show_before_statistics_are_inferred(method: MethodSpec, protocol: str, model: ModelSpec) -> None:
    with pytest.raises(ValueError, match=r"window|windo|papper|Y-O-SL"):
        PreparedRun(RunSpec(model, method, STREAM, protocol)).method.adapter(quiet())


@pytest.mark.usefixtures("no_inference")
def test_mistakes_in_the_stream_show_before_the_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelSpec, "load", lambda self: pytest.fail("it was loaded"))
    for stream, protocol in ((replace(STREAM, order="correlated"), "N-O-SF"), (STREAM, "N-O")):
        with pytest.raises(ValueError, match=r"concentration|unknown protocol"):
            PreparedRun(RunSpec(ModelSpec("nowhere"), SMALL, stream, protocol))
    with pytest.raises(ProtocolError):
        PreparedRun(RunSpec(ModelSpec("nowhere"), SMALL, STREAM, "N-O"))


def test_inferred_statistics_are_kept(model: ModelSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, file = PreparedMethod(SMALL, model.load()), tmp_path / "inferred.safetensors"
    first = method.adapter(quiet(), keep=file)
    monkeypatch.setattr(SourceStatistics, "infer", lambda *_, **__: pytest.fail("it was inferred again"))
    second = method.adapter(quiet(), keep=file)
    assert first.stats is not None
    assert second.stats is not None
    assert first.stats.fingerprint() == second.stats.fingerprint()


def test_words_are_read_as_the_types_of_the_method() -> None:
    words = {"window": "32", "lr": "1e-3", "flip": "false", "predict": "before"}
    assert read_options("ttac++", words) == {"window": 32, "lr": 1e-3, "flip": False, "predict": "before"}
    assert read_options("ttac++", {"lr": "null", "unknown": "1"}) == {"lr": None, "unknown": "1"}
    for wrong in ({"window": "wide"}, {"flip": "maybe"}, {"lr": "nan"}, {"predict": "late"}):
        with pytest.raises(ValueError, match=f"--set {next(iter(wrong))}"):
            read_options("ttac++", wrong)
