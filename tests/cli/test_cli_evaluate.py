"""`ttac evaluate` as a user meets it: what it measures, what it leaves alone, and the message for every mistake."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import ttac
from data_helpers import read_data
from ttac.cli import main
from ttac.data.streams import Domain, Scenario, Stream, corrupted_domains
from ttac.evaluation.records import Record
from ttac.model.networks import ResNet
from ttac.model.weights import classifier_of
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.loading import ModelDescription, load_model, save_model
from ttac.source.objectives import make_objective
from ttac.source.statistics import SourceStatistics

DIGITS = tuple(map(str, range(10)))
NAMES = ("ant", "bee", "cat", "dog")
SMALL = ["--set", "window=16"]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untrained models for digits and for small photographs, a folder in CIFAR-C's form and one of class folders."""
    folder = tmp_path_factory.mktemp("world")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        digits = ResNet(8, 10, channels=1, width=4, stem_stride=2)
        photos = ResNet(8, 4, width=4)
    options = {"width": 4, "stem_stride": 2}
    described = ModelDescription(
        "resnet8", 10, 1, size=(32, 32), classes=DIGITS, arch_options=options, mean=(0.0,), std=(1.0,)
    )
    save_model(folder / "digits.safetensors", digits, described)
    save_model(
        folder / "photos.safetensors",
        photos,
        ModelDescription("resnet8", 4, size=(16, 16), classes=NAMES, mean=(0.0,), std=(1.0,)),
    )
    save_model(
        folder / "nameless.safetensors", photos, ModelDescription("resnet8", 4, size=(16, 16), mean=(0.0,), std=(1.0,))
    )
    random = np.random.default_rng(0)
    (folder / "published").mkdir()
    np.save(folder / "published/labels.npy", np.tile(np.arange(12) % 4, 5))
    for name in ("fog", "snow"):
        np.save(folder / f"published/{name}.npy", random.integers(0, 256, (60, 16, 16, 3), dtype=np.uint8))
    for number in range(12):
        path = folder / "photos" / NAMES[1 + number % 3] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 18, 3), dtype=np.uint8)).save(path)
    return folder


def evaluate(world: Path, out: Path, *more: str, model: str = "digits.safetensors", data: str = "digits") -> int:
    return main(["evaluate", "--model", f"{world}/{model}", "--data", data, "--out", str(out), *more])


def test_a_record_is_that_of_the_library(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new/record.json"
    more = ["--corruption", "gaussian_noise", "impulse_noise", "--severity", "3", "--scenario", "continual"]
    more += ["--order", "correlated", "--concentration", "0.1", "--imbalance", "4", "--interlude", "10"]
    more += ["--samples", "40", "--batch", "16", "--seed", "5", "--method", "tent", *SMALL]
    assert evaluate(world, out, *more) == 0
    said = capsys.readouterr().out
    record = Record.load(out)
    clean = read_data("digits", split="test")
    domains = corrupted_domains(clean, ["gaussian_noise", "impulse_noise"], (3,), seed=5)
    scenario = Scenario("continual", "correlated", 0.1, 4.0, interlude=10, samples=40, batch=16, seed=5)
    adapter = ttac.adapt(load_model(f"{world}/digits.safetensors").classifier, "tent", window=16, seed=5)
    expected = ttac.evaluate(adapter, Stream(domains, scenario, clean=clean), "N-O-SF")
    for field in ("samples", "error", "cumulative_error", "class_error", "domain_error", "segments", "counters"):
        assert getattr(record, field) == getattr(expected, field), field
    assert record.provenance["stream"] == expected.provenance["stream"]
    assert list(record.domain_error) == ["gaussian_noise 3", "clean", "impulse_noise 3"]
    for name, found in record.domain_error.items():
        assert f"{name}: {found['error']:.2f} % error of {found['samples']} samples\n" in said
    assert said.splitlines()[-1] == f"{out}: {record.error:.2f} % error of 100 samples, tent under N-O-SF"
    assert f"100/100 {record.error:.2f} % error" in said


def test_prefetching_changes_nothing(world: Path, tmp_path: Path) -> None:
    errors = []
    for ahead in ("0", "3"):
        out = tmp_path / f"{ahead}.json"
        more = ["--corruption", "gaussian_noise", "--method", "bn", "--samples", "48", "--prefetch", ahead, *SMALL]
        assert evaluate(world, out, *more) == 0
        errors.append(Record.load(out).cumulative_error)
    assert errors[0] == errors[1]


def test_published_domains_are_read_and_not_corrupted(world: Path, tmp_path: Path) -> None:
    published, photos = f"{world}/published", f"{world}/photos"
    common = {"model": "photos.safetensors", "data": published}
    assert evaluate(world, tmp_path / "one.json", "--domain", "fog", "--method", "test", **common) == 0
    pixels, labels = (torch.from_numpy(np.load(f"{published}/{name}.npy")) for name in ("fog", "labels"))
    classifier = load_model(f"{world}/photos.safetensors").classifier
    logits = classifier(pixels[48:].permute(0, 3, 1, 2).float() / 255)
    record = Record.load(tmp_path / "one.json")
    assert record.domain_error == {"fog 5": {"samples": 12, "error": record.error}}
    assert record.error == pytest.approx(100 * float((logits.argmax(1) != labels[48:]).float().mean()))

    more = ["--domain", "fog", "snow", "--scenario", "gradual", "--method", "test"]
    assert evaluate(world, tmp_path / "two.json", *more, "--interlude", "5", "--clean", photos, **common) == 0
    names = [name for name, _, _ in Record.load(tmp_path / "two.json").segments]
    up = [1, 2, 3, 4, 5, 4, 3, 2, 1]
    assert names == [*(f"fog {s}" for s in up), "clean", *(f"snow {s}" for s in up), "clean"]
    assert evaluate(world, tmp_path / "three.json", *more, "--severity", "2", "4", **common) == 0
    assert [name for name, _, _ in Record.load(tmp_path / "three.json").segments][:3] == ["fog 2", "fog 4", "fog 2"]


def test_labels_go_by_the_names_that_the_model_knows(world: Path, tmp_path: Path) -> None:
    out = tmp_path / "record.json"
    common = {"model": "photos.safetensors", "data": f"{world}/photos"}
    assert evaluate(world, out, "--method", "test", "--order", "given", **common) == 0
    record = Record.load(out)
    assert record.class_error[0] is None  # there is no ant in the folder, and the bees are not taken for ants
    assert all(error is not None for error in record.class_error[1:])
    data = read_data(f"{world}/photos", size=(16, 16), classes=NAMES)
    adapter = ttac.adapt(load_model(f"{world}/photos.safetensors").classifier, "test")
    assert record.error == ttac.evaluate(adapter, Stream([Domain("a", data)], Scenario()), "N-O-SF").error
    assert list(record.domain_error) == ["photos"]


def test_a_record_that_is_there_stays(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "record.json"
    more = ["--method", "bn", "--samples", "40", *SMALL]
    assert evaluate(world, out, *more) == 0
    before = out.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("ttac.evaluation.prepare.evaluate", lambda *_, **__: pytest.fail("it was computed again"))
        assert evaluate(world, out, *more, "--prefetch", "0") == 0  # reading ahead is no part of the result
        assert "is there: nothing to do" in capsys.readouterr().out
        for changed, message in (
            (["--samples", "41"], "samples: 40 there, 41 now"),
            (["--seed", "1"], "seed: 0 there, 1 now"),
            (["--method", "tent"], "method: bn there, tent now"),
            (["--corruption", "gaussian_noise"], "domains: ['digits'] there, ['gaussian_noise 5'] now"),
            (["--protocol", "N-M-SF"], "protocol: N-O-SF there, N-M-SF now"),
        ):
            assert evaluate(world, out, *more, *changed) == 2
            assert message in capsys.readouterr().err
        out.write_text("precious")
        assert evaluate(world, out, *more) == 2
        assert "is a file of something else: choose another --out" in capsys.readouterr().err
        assert evaluate(world, tmp_path, *more) == 2
        assert "is a folder; name a file" in capsys.readouterr().err
    assert before != out.read_bytes() == b"precious"


def test_statistics_are_those_that_the_protocol_allows(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = load_model(f"{world}/photos.safetensors")
    data = read_data(f"{world}/published", domain="snow", severity=1)
    collected = SourceStatistics.collect(loaded.classifier, data.batches(12))
    save_bundle(
        tmp_path / "bundle",
        Bundle(loaded.classifier, loaded.description, make_objective("poly", epsilon=2.0), collected),
    )
    collected.save(tmp_path / "stats")

    def run(out: str, *more: str) -> int:
        arguments = ["--method", "ttac++", "--set", "window=8", "--set", "queue=0", "--set", "passes=1", *more]
        common = ["--data", f"{world}/published", "--domain", "fog", "--out", f"{tmp_path}/{out}"]
        return main(["evaluate", "--model", f"{tmp_path}/bundle", *common, *arguments])

    assert run("free.json") == 0
    assert "anchors are inferred from the head's weights (source-free)" in capsys.readouterr().out
    assert run("light.json", "--protocol", "N-O-SL") == 0
    assert "anchors are those of the bundle, collected from 12 source images" in capsys.readouterr().out
    known = [Record.load(tmp_path / name).provenance["knowledge"]["statistics"] for name in ("free.json", "light.json")]
    assert [statistics["samples"] for statistics in known] == [0, 12]
    assert run("refused.json", "--stats", f"{tmp_path}/stats") == 2
    assert "N-O-SF is source-free, and this TTAC++ holds statistics" in capsys.readouterr().err
    assert run("refused.json", "--protocol", "Y-O-SL") == 2
    assert "is for models trained with a branch" in capsys.readouterr().err
    assert not (tmp_path / "refused.json").exists()
    conjugate = ["--method", "conjugate", "--set", "window=8"]
    common = ["--data", f"{world}/published", "--domain", "fog", "--out", f"{tmp_path}/told.json"]
    assert main(["evaluate", "--model", f"{tmp_path}/bundle", *common, *conjugate]) == 0
    assert "source_loss is poly, epsilon is 2.0, as the bundle was trained" in capsys.readouterr().out
    assert Record.load(tmp_path / "told.json").provenance["options"]["epsilon"] == 2.0
    assert load_bundle(tmp_path / "bundle").statistics is not None


def test_multi_pass_protocols_take_epochs(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--method", "bn", "--samples", "32", "--epochs", "2", *SMALL]
    assert evaluate(world, tmp_path / "a.json", *more, "--protocol", "N-M-SF") == 0
    assert Record.load(tmp_path / "a.json").provenance["epochs"] == 2
    assert evaluate(world, tmp_path / "b.json", *more) == 2
    assert "epochs belong to the multi-pass protocols" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data", "nowhere"], "no folder nowhere"),
        (["--protocol", "N-O"], "unknown protocol 'N-O'"),
        (["--order", "correlated"], "concentration belong together"),
        (["--imbalance", "0.5"], "--imbalance"),
        (["--samples", "1001"], "digits has 1000 samples, and 1001 are asked for"),
        (["--corruption", "fogg"], "unknown corruption: 'fogg'; did you mean fog?"),
        (["--corruption", "fog", "--severity", "6"], "severity must be from 1 to 5, not 6"),
        (["--corruption", "fog", "snow"], "of one domain, not 2: choose continual"),
        (["--corruption", "fog", "--domain", "fog"], "not both"),
        (["--domain", "fog"], "digits has no domains"),
        (["--severity", "3"], "digits has no severities"),
        (["--interlude", "5"], "name them with --clean"),
        (["--method", "ttaac"], "unknown method: 'ttaac'; did you mean ttac"),
        (["--set", "windo=3"], "unknown option of bn: 'windo'"),
        (["--model", "{world}/photos.safetensors"], "channels"),
        (["--split", "middle"], "digits has no middle images: choose train or test"),
        (["--out", "{world}/digits.safetensors/record.json"], "digits.safetensors"),
    ],
)
def test_mistakes_have_one_line_and_leave_no_record(
    more: list[str], message: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = [part.format(world=world) for part in more]
    assert evaluate(world, tmp_path / "out/record.json", "--method", "bn", *changed) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_classes_that_cannot_be_matched_are_refused(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, photos = tmp_path / "record.json", f"{world}/photos"
    assert evaluate(world, out, "--method", "test", model="nameless.safetensors", data=photos) == 2
    assert "the data have 3 classes, the model has 4: name those of the model with --classes" in capsys.readouterr().err
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    named = ["--classes", f"{tmp_path}/names.txt"]
    assert evaluate(world, out, "--method", "test", *named, model="nameless.safetensors", data=photos) == 0
    other = classifier_of(
        ResNet(8, 3, channels=1, width=4),
        ModelDescription("resnet8", 3, 1, classes=("a", "b", "c"), mean=(0.0,), std=(1.0,)),
    )
    save_model(tmp_path / "three.safetensors", other.classifier.model, other.description)
    digits = ["--data", "digits", "--method", "test", "--out", f"{tmp_path}/no.json"]
    assert main(["evaluate", "--model", f"{tmp_path}/three.safetensors", *digits]) == 2
    assert "the data have 10 classes, the model has 3" in capsys.readouterr().err


@pytest.mark.parametrize("data", ["{world}/photos", "digits"])
def test_another_order_of_classes_is_another_run(
    data: str, world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names, model = (DIGITS, "digits.safetensors") if data == "digits" else (NAMES, "nameless.safetensors")
    network = load_model(f"{world}/{model}")
    for file, order in (("a", names), ("b", names[::-1])):
        named = dataclasses.replace(network.description, classes=order)
        save_model(tmp_path / f"{file}.safetensors", network.classifier.model, named)

    def run(model: str) -> int:
        common = ["--method", "test", "--data", data.format(world=world), "--out", f"{tmp_path}/record.json"]
        return main(["evaluate", "--model", f"{tmp_path}/{model}.safetensors", *common])

    assert run("a") == 0
    assert run("a") == 0
    assert "is there: nothing to do" in capsys.readouterr().out
    assert run("b") == 2
    assert "is of another run (" in capsys.readouterr().err
