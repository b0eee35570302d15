"""`ttac replay` against a server that is a stub: the stream of `ttac evaluate`, and what happens on its way."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from oip_stub import Stub, serving

from ttac.cli import main
from ttac.evaluation.records import Record
from ttac.model.networks import ResNet
from ttac.source.loading import ModelDescription, load_model, save_model

DIGITS = [str(number) for number in range(10)]
STREAM = ["--corruption", "gaussian_noise", "impulse_noise", "--scenario", "continual", "--samples", "12"]
STREAM += ["--interlude", "3", "--seed", "4"]
# Settings of the stream, which the records of both commands have.
SAME = {"sequence", "order", "concentration", "balance", "interlude", "samples", "batch", "seed", "domains", "data"}
SAME |= {"classes"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "digits.safetensors"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, 10, channels=1, width=4, stem_stride=2)
    options = {"width": 4, "stem_stride": 2}
    described = ModelDescription(
        "resnet8", 10, 1, size=(32, 32), classes=tuple(DIGITS), arch_options=options, mean=(0.0,), std=(1.0,)
    )
    save_model(path, network, described)
    return path


@pytest.fixture(scope="module")
def predict(model: Path) -> Callable[[np.ndarray], np.ndarray]:
    classifier = load_model(str(model)).classifier

    def logits(pixels: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return classifier(torch.from_numpy(pixels)).numpy()

    return logits


@pytest.fixture
def stub(predict: Callable[[np.ndarray], np.ndarray]) -> Iterator[Stub]:
    with serving(predict, (1, 32, 32), 10, classes=DIGITS) as running:
        yield running


def replay(stub: Stub, *more: str) -> int:
    return main(["replay", "--url", stub.address, *more])


def read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def test_the_error_is_that_of_evaluate(
    stub: Stub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "evaluate.json", tmp_path / "new/replay.json"
    more = [*STREAM, "--batch", "4"]
    assert main(["evaluate", "--model", str(model), "--method", "test", "--out", str(here), *more]) == 0
    capsys.readouterr()
    stub.samples_a_version = 8
    assert replay(stub, "--out", str(there), *more) == 0
    expected, record = Record.load(here), read(there)
    assert record["samples"] == 30
    assert 0 < record["error"] == expected.error < 100
    assert record["cumulative_error"] == [list(pair) for pair in expected.cumulative_error]
    assert record["class_error"] == expected.class_error
    assert record["domain_error"] == expected.domain_error
    assert record["segments"] == [list(segment) for segment in expected.segments]
    assert record["stream"] == expected.provenance["stream"]
    assert record["versions"] == [[0, "1"], [8, "2"], [16, "3"], [24, "4"]]
    assert record["latency_ms"]["count"] == 8
    assert {name: record["settings"][name] for name in sorted(SAME)} == {
        name: expected.provenance["settings"][name] for name in sorted(SAME)
    }
    # What the server had counted before is none of this stream's.
    counts = {"lag": 3, "dropped": 3, "samples": 30, "refused_samples": 0, "updates": 0}
    assert record["server"]["adapter"] | counts == record["server"]["adapter"]
    assert record["server"]["predictor"] | {"images": 30, "refused": 0} == record["server"]["predictor"]
    assert (record["resent"], record["refused"]) == (0, 0)
    assert record["environment"]["command"]
    assert stub.connections == 1

    said = capsys.readouterr().out
    curve = dict(record["cumulative_error"])
    rows = [line.split("│")[1:5] for line in said.splitlines() if line.startswith("│")]
    cells = [[cell.strip() for cell in row] for row in rows]
    assert [int(row[0]) for row in cells] == list(range(3, 31, 3))
    assert [row[3] for row in cells] == ["1", "1", "2", "2", "2", "3", "3", "3", "4", "4"]
    assert all(float(row[2]) == pytest.approx(curve[int(row[0])], abs=0.01) for row in cells if int(row[0]) in curve)
    parts = [float(row[1]) for row in cells]
    assert sum(parts) / 10 == pytest.approx(record["error"], abs=0.01)
    assert said.splitlines()[-1] == f"{there}: {record['error']:.2f} % error of 30 samples"
    assert "of the server meanwhile: 30 images answered, 0 requests refused" in said
    assert "of its adapter: 3 samples missed, 0 refused by the guard, 3 waiting" in said
    assert f"30/30 {record['error']:.2f} % error, version 4" in said


def test_images_alone_reach_the_server(stub: Stub) -> None:
    assert replay(stub, "--samples", "3", "--order", "given") == 0
    for request in stub.requests:
        assert [(one["name"], one["shape"], one["datatype"]) for one in request["inputs"]] == [
            ("images", [1, 1, 32, 32], "UINT8")
        ]
        assert sorted(request) == ["inputs", "outputs"]


def test_labels_go_by_the_names_that_the_server_knows(
    stub: Stub, tmp_path: Path, predict: Callable[[np.ndarray], np.ndarray]
) -> None:
    assert replay(stub, "--samples", "40", "--out", f"{tmp_path}/a.json") == 0
    stub.classes, stub.predict = DIGITS[::-1], lambda pixels: predict(pixels)[:, ::-1]
    assert replay(stub, "--samples", "40", "--out", f"{tmp_path}/b.json") == 0
    stub.classes = None
    (tmp_path / "names.txt").write_text("\n".join(DIGITS[::-1]))
    named = ["--classes", f"{tmp_path}/names.txt"]
    assert replay(stub, "--samples", "40", "--out", f"{tmp_path}/c.json", *named) == 0
    errors = [read(tmp_path / f"{name}.json")["error"] for name in "abc"]
    assert 0 < errors[0] == errors[1] == errors[2] < 100


def test_a_sample_whose_answer_was_lost_is_sent_again(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert replay(stub, "--samples", "10", "--out", f"{tmp_path}/smooth.json") == 0
    monkeypatch.setattr("ttac.serving.client.time.sleep", lambda seconds: None)
    capsys.readouterr()
    stub.faults = ["lost", "lost", 429, 503, "broken"]
    stub.lost_questions = 2  # which are asked again too, and are no samples
    assert replay(stub, "--samples", "10", "--out", f"{tmp_path}/rough.json") == 0
    smooth, rough = (read(tmp_path / f"{name}.json") for name in ("smooth", "rough"))
    assert rough["cumulative_error"] == smooth["cumulative_error"]
    assert (rough["resent"], rough["refused"]) == (3, 2)
    said = capsys.readouterr().out
    assert "Trying again for 30 s" in said
    assert "sent again: 3, refused for a while: 2" in said


def test_a_rate_is_kept(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    sent: list[float] = []
    stub.predict = lambda pixels: (sent.append(clock[0]), np.zeros((len(pixels), 10), np.float32))[1]

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    monkeypatch.setattr("ttac.serving.replay.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    assert replay(stub, "--samples", "9", "--batch", "2", "--rate", "4", "--out", f"{tmp_path}/a.json") == 0
    np.testing.assert_allclose(np.array(sent) - 100, [0.0, 0.5, 1.0, 1.5, 2.0])
    record = read(tmp_path / "a.json")
    assert record["seconds"] == pytest.approx(2.0)
    assert record["latency_ms"]["max"] == 0


def test_a_latency_counts_from_when_a_request_was_due(
    stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock, answers = [100.0], iter([2.0, 0.25, 0.25, 0.25] * 2)  # seconds that each answer takes

    def slow(pixels: np.ndarray) -> np.ndarray:
        clock[0] += next(answers)
        return np.zeros((len(pixels), 10), np.float32)

    def sleep(seconds: float) -> None:
        clock[0] += seconds

    stub.predict = slow
    monkeypatch.setattr("ttac.serving.replay.time", SimpleNamespace(monotonic=lambda: clock[0], sleep=sleep))
    said = {}
    for name, more in {"due": ["--rate", "1"], "sent": []}.items():
        assert replay(stub, "--samples", "4", "--out", f"{tmp_path}/{name}.json", *more) == 0
        said[name] = capsys.readouterr().out
    due, sent = (read(tmp_path / f"{name}.json") for name in ("due", "sent"))
    # Due at 0, 1, 2, 3; answered at 2, 2.25, 2.5, 3.25.
    assert due["latency_ms"]["mean"] == pytest.approx(1000 * (2 + 1.25 + 0.5 + 0.25) / 4)
    assert sent["latency_ms"]["mean"] == pytest.approx(1000 * (2 + 3 * 0.25) / 4)
    assert (due["latency_from"], sent["latency_from"]) == ("when it was due", "sending")
    assert ", from when it was due" in said["due"]
    assert ", from sending" in said["sent"]


@pytest.mark.parametrize("killed", ["predictor", "adapter"])
def test_what_a_process_counted_before_it_was_started_again_is_unknown(
    stub: Stub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    predict: Callable[[np.ndarray], np.ndarray],
    killed: str,
) -> None:
    def restart(pixels: np.ndarray) -> np.ndarray:
        stub.restarts[killed] = 1
        return predict(pixels)

    stub.predict = restart
    assert replay(stub, "--samples", "20", "--out", f"{tmp_path}/a.json") == 0
    server, said = read(tmp_path / "a.json")["server"], capsys.readouterr().out
    known = {
        "predictor": {"requests": 0, "images": 20, "refused": 0},
        "adapter": {"samples": 20, "refused_samples": 0, "updates": 0, "dropped": 2},
    }
    for part, counts in known.items():
        expected = dict.fromkeys(counts) if part == killed else counts
        assert {name: server[part][name] for name in counts} == expected
    assert server[killed]["restarts"] == 1
    assert said.count("unknown") == 2


def test_a_record_that_is_there_stays(stub: Stub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "record.json"
    assert replay(stub, "--samples", "5", "--out", str(out)) == 0
    before, asked = out.read_bytes(), len(stub.images)
    assert replay(stub, "--samples", "5", "--out", str(out)) == 0
    assert "is there: nothing to do" in capsys.readouterr().out
    assert replay(stub, "--samples", "6", "--out", str(out)) == 2
    assert "is of another run (samples: 5 there, 6 now)" in capsys.readouterr().err
    assert before == out.read_bytes()
    out.write_text('{"settings": {}, "format": "other"}')
    assert replay(stub, "--samples", "5", "--out", str(out)) == 2
    assert "is a file of something else" in capsys.readouterr().err
    assert replay(stub, "--samples", "5", "--out", str(tmp_path)) == 2
    assert "is a folder; name a file" in capsys.readouterr().err
    assert len(stub.images) == asked


@pytest.mark.parametrize(
    ("more", "change", "message"),
    [
        (["--url", "localhost:1"], {}, "'localhost:1' is no address of a server: write it as http://localhost:1"),
        (["--url", "http://127.0.0.1:9"], {}, "http://127.0.0.1:9 does not answer"),
        (["--name", "other"], {}, "serves the model tiny, not other"),
        ([], {"token": "secret"}, "does not let us in (401, no token): name the file of its token with --token-file"),
        (["--token-file", "{folder}/wrong"], {"token": "secret"}, "it wants another token"),
        ([], {"shape": (3, 32, 32)}, "channels"),
        (
            ["--data", "{folder}/arrays"],
            {"shape": (3, 32, 32)},
            "the images are 3 x 8 x 8, and the server takes 3 x 32",
        ),
        ([], {"num_classes": 4, "classes": None}, "the data have 10 classes, the model has 4"),
        ([], {"classes": list("abcdefghij")}, "the classes of the data are not those of the model"),
        ([], {"answers": {"/v2/models/tiny": b"{}"}}, "does not describe its model as ttac serve does"),
        (["--classes", "{folder}/wrong"], {}, "there are 1 class names for 10 classes"),
        (["--data", "nowhere"], {}, "no folder nowhere"),
        (["--corruption", "fogg"], {}, "did you mean fog?"),
        ([], {"faults": ["lost"]}, "is the server running?"),
        ([], {"faults": [500]}, "/infer answers 500, told to"),
        ([], {"faults": [429]}, "refuses requests (429, told to)"),
    ],
)
def test_mistakes_have_one_line_and_leave_no_record(
    more: list[str],
    change: dict[str, Any],
    message: str,
    stub: Stub,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in change.items():
        setattr(stub, name, value)
    folder = tmp_path / "given"
    (folder / "arrays").mkdir(parents=True)
    np.save(folder / "arrays/images.npy", np.zeros((4, 8, 8, 3), np.uint8))
    np.save(folder / "arrays/labels.npy", np.arange(4))
    (folder / "wrong").write_text("wrong")
    out = tmp_path / "record.json"
    arguments = [part.format(folder=folder) for part in more]
    assert replay(stub, "--samples", "4", "--patience", "0", "--out", str(out), *arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert not out.exists()
