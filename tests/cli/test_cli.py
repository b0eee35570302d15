"""The command line as a user meets it: results, interruptions, and the message for every mistake."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ttac import __version__, adapt
from ttac.cli import main, parse_options
from ttac.common.resumable import saved_progress
from ttac.data.folder import FolderStream, list_images
from ttac.evaluation.records import Record
from ttac.methods.base import Adapter
from ttac.model.networks import ResNet
from ttac.source.bundle import Bundle, save_bundle
from ttac.source.loading import ModelDescription, load_model, save_model
from ttac.source.objectives import make_objective
from ttac.source.statistics import SourceStatistics

RESULTS = ("predictions.csv", "adapted.safetensors")
CLASSES = ("ant", "bee", "cat", "[dog]")
COUNT = 43
BROKEN = ("10.png", "21.png")


@pytest.fixture
def world(tmp_path: Path) -> Path:
    """A folder with a model, and images of which two cannot be read."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = ResNet(8, len(CLASSES), width=4)
    save_model(tmp_path / "model.safetensors", network, ModelDescription("resnet8", 4, size=(16, 16), classes=CLASSES))
    random = np.random.default_rng(0)
    (tmp_path / "images").mkdir()
    for number in range(COUNT):
        pixels = random.integers(0, 256, (20, 18, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"images/{number:02d}.png")
    for name in BROKEN:
        (tmp_path / "images" / name).write_text("no image")
    return tmp_path


def command(world: Path, out: str, *more: str) -> list[str]:
    return [
        "adapt", "--model", f"{world}/model.safetensors", "--images", f"{world}/images", "--out", f"{world}/{out}",
        "--batch", "5", "--set", "window=8", "--set", "queue=16", "--set", "passes=1", "--checkpoint-every", "0", *more,
    ]  # fmt: skip


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def interrupt_at(call: int, action: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something in the middle of a batch."""
    arrive, calls = Adapter.__call__, iter(range(1, 10**6))

    def arriving(self: Adapter, images: torch.Tensor) -> torch.Tensor:
        logits = arrive(self, images)
        if next(calls) == call:
            action()
        return logits

    monkeypatch.setattr(Adapter, "__call__", arriving)


def test_a_whole_run(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command(world, "out")) == 0
    said = capsys.readouterr().out
    assert "resnet8: 4 classes, 16 x 16, mean 0, std 1" in said
    assert "inferred from the head's weights (source-free)" in said
    assert "skipped '10.png': not an image" in said
    assert "images/s, 5 updates" in said
    assert "41 images predicted, 5 updates, 2 unreadable" in said

    out = world / "out"
    assert sorted(contents(out)) == ["adapted.safetensors", "inferred.safetensors", "predictions.csv", "record.json"]
    with (out / "predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [row["file"] for row in rows] == [f"{n:02d}.png" for n in range(COUNT) if f"{n:02d}.png" not in BROKEN]
    assert {row["label"] for row in rows} <= set(CLASSES)
    assert all(0.25 <= float(row["confidence"]) <= 1 for row in rows)

    record = Record.load(out / "record.json")
    assert (record.samples, record.error) == (41, None)
    assert record.provenance["images"] == "images"
    assert [name for name, _ in record.provenance["unreadable"]] == list(BROKEN)
    assert record.provenance["arrival_batch_sizes"] == [3, 4, 5]
    assert record.provenance["reset"] == "fresh"

    source, adapted = (load_model(str(path)) for path in (world / "model.safetensors", out / "adapted.safetensors"))
    assert adapted.description == source.description
    assert adapted.classifier.fingerprint() != source.classifier.fingerprint()


def test_predictions_are_those_of_the_adapter(world: Path) -> None:
    assert main(command(world, "out")) == 0
    again = load_model(f"{world}/model.safetensors")
    stats = SourceStatistics.load(world / "out/inferred.safetensors", again.classifier)
    adapter = adapt(again.classifier, stats=stats, window=8, queue=16, passes=1)
    files = list_images(world / "images")
    logits = torch.cat([adapter(images) for images, _ in FolderStream(world / "images", files, 5, (16, 16), 3)])
    with (world / "out/predictions.csv").open(newline="") as table:
        rows = list(csv.DictReader(table))
    assert [CLASSES.index(row["label"]) for row in rows] == logits.argmax(1).tolist()
    confidence = torch.tensor([float(row["confidence"]) for row in rows])
    torch.testing.assert_close(confidence, logits.softmax(1).max(1).values, atol=1e-6, rtol=0)


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
        "from ttac.methods.base import Adapter\n"
        "arrive, calls = Adapter.__call__, iter(range(9))\n"
        "def arriving(self, images):\n"
        "    logits = arrive(self, images)\n"
        "    if next(calls) == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return logits\n"
        "Adapter.__call__ = arriving\n"
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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "{world}/nowhere.pt"}, "error: no model file"),
        ({"--model": "bundle/"}, "error: no model file bundle/, nor a bundle"),
        ({"--images": "{world}/nowhere"}, "error: no folder"),
        ({"--images": "{world}/empty"}, "error: no image in"),
        ({"--images": "{world}/broken"}, "error: none of 1 images could be read"),
        ({"--stats": "{world}/nowhere"}, "error: no statistics file"),
        ({"--stats": "{world}/model.safetensors"}, "is not a readable statistics file"),
        ({"--out": "{world}/model.safetensors"}, "is a file; name a folder"),
        ({"--method": "ttaac"}, "unknown method: 'ttaac'; did you mean ttac"),
        ({"--preset": "papper"}, "unknown preset of ttac++: 'papper'; did you mean paper"),
        ({"--set": "windo=3"}, "unknown option of ttac++: 'windo'; did you mean window"),
        ({"--set": "window"}, "--set wants key=value, not 'window'"),
        ({"--set": "window=wide"}, "--set window=wide: "),
        ({"--set": "window=0"}, "window must be at least 2"),
        ({"--set": "flip=maybe"}, "--set flip=maybe: "),
        ({"--classes": "{world}/two.txt"}, "there are 2 class names for 4 classes"),
        ({"--classes": "{world}/nowhere.txt"}, "nowhere.txt"),
        ({"--head": "conv1"}, "error: head='conv1'"),
        ({"--std": "0"}, "std must be positive"),
        ({"--device": "abacus"}, "device 'abacus' cannot be used"),
        ({"--arch": "resnet14"}, "do not fit resnet14"),
    ],
)
def test_mistakes_have_one_line_and_leave_no_results(
    change: dict[str, str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (world / "empty").mkdir()
    (world / "broken").mkdir()
    (world / "broken/a.png").write_text("no image")
    (world / "two.txt").write_text("a\nb\n")
    more = [part.format(world=world) for pair in change.items() for part in pair]
    assert main(command(world, "out", *more)) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert message in said
    assert "Traceback" not in said
    assert not (world / "out/predictions.csv").exists()


@pytest.mark.parametrize(
    "arguments",
    [["adapt", "--modell", "x"], ["adapt", "--mod", "x"], ["adapt"], ["stats"], [], ["fly"], ["demo", "--seed", "-1"]],
)
def test_unknown_arguments_are_refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    assert "error: " in capsys.readouterr().err


def test_a_model_that_takes_other_sizes_is_asked_before_anything_is_written(
    world: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = (
        "import torch\ndef net(): return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 16 * 16, 4))\n"
    )
    (world / "my_networks.py").write_text(module)
    torch.save(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 4)).state_dict(), world / "flat.pt")
    monkeypatch.chdir(world)
    monkeypatch.setattr(sys, "path", [*sys.path])
    flat = ["--model", "flat.pt", "--arch", "my_networks:net", "--method", "bn"]
    plain = command(world, "out")[: command(world, "out").index("--set")]
    assert main([*plain, *flat]) == 2
    assert "the model does not take 20 x 18 images" in capsys.readouterr().err
    assert not (world / "out").exists()
    assert main([*plain, *flat, "--size", "16"]) == 0
    with (world / "out/predictions.csv").open(newline="") as table:
        assert {row["label"] for row in csv.DictReader(table)} <= {"0", "1", "2", "3"}


def test_statistics_of_another_model_are_refused_with_both_fingerprints(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, stats = f"{world}/model.safetensors", f"{world}/stats.safetensors"
    assert main(["stats", "infer", "--model", model, "--out", stats]) == 0
    assert capsys.readouterr().out == f"{stats}: 4 classes and 16 features, inferred from the head (source-free)\n"
    assert main(command(world, "out", "--stats", stats)) == 0
    assert main(command(world, "again", "--stats", stats, "--model", f"{world}/out/adapted.safetensors")) == 2
    said = capsys.readouterr().err
    for path in (model, f"{world}/out/adapted.safetensors"):
        assert load_model(path).classifier.fingerprint() in said


def test_statistics_are_collected_by_subfolder_or_by_prediction(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, path in enumerate(sorted((world / "images").iterdir())):
        folder = world / "source" / CLASSES[number % 4]
        folder.mkdir(parents=True, exist_ok=True)
        path.rename(folder / path.name)
    collect = ["stats", "collect", "--model", f"{world}/model.safetensors", "--out", f"{world}/stats"]
    assert main([*collect, "--images", f"{world}/source", "--family", "diagonal"]) == 0
    said = capsys.readouterr().out
    assert "41 images, 10 to 11 in each of 4 classes by label, diagonal covariances, 2 unreadable" in said
    stats = SourceStatistics.load(world / "stats", load_model(f"{world}/model.safetensors").classifier)
    assert stats.origin.counts == (11, 10, 10, 10)

    assert main([*collect, "--images", f"{world}/source/ant"]) == 2
    assert "grouped by prediction" in capsys.readouterr().err
    (world / "source/eel").mkdir()
    (world / "source/ant/00.png").rename(world / "source/eel/00.png")
    assert main([*collect, "--images", f"{world}/source"]) == 2
    assert "no class of the model: eel" in capsys.readouterr().err
    assert main([*collect, "--images", f"{world}/source", "--family", "round"]) == 2
    assert main([*collect, "--images", f"{world}/source", "--group-by", "label", "--family", "round"]) == 2


def test_options_have_the_types_of_the_method() -> None:
    pairs = ["window=32", "lr=1e-3", "flip=false", "predict=before"]
    assert parse_options("ttac++", pairs) == {"window": 32, "lr": 1e-3, "flip": False, "predict": "before"}
    assert parse_options("ttac++", ["lr=null"]) == {"lr": None}


def test_the_demo_gets_what_was_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls = []
    module = type(sys)("ttac.benchmark.demo")
    module.run_demo = lambda out, seed, cache: calls.append((out, seed, cache))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "ttac.benchmark.demo", module)
    assert main(["demo"]) == 0
    assert main(["demo", "--out", str(tmp_path), "--seed", "3", "--cache", "c"]) == 0
    assert calls == [(Path("out/demo"), 0, None), (tmp_path, 3, Path("c"))]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["adapt", "--help"],
        ["stats", "collect", "--help"],
        ["methods", "--help"],
        ["--version"],
    ],
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import json, sys, ttac.cli\n"
        "try: ttac.cli.main(sys.argv[1:])\n"
        "except SystemExit as stop: print(json.dumps([stop.code, sorted(sys.modules)]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True, env=environment
    )
    exit_code, modules = json.loads(ended.stdout.splitlines()[-1])
    assert exit_code == 0
    assert not {"torch", "numpy", "timm", "torchvision", "PIL"} & set(modules)
    if arguments == ["--version"]:
        assert ended.stdout.splitlines()[0] == f"ttac {__version__}"


def poly_bundle(world: Path, epsilon: float = 2.0) -> str:
    loaded = load_model(f"{world}/model.safetensors")
    folder = world / f"poly{epsilon}"
    save_bundle(folder, Bundle(loaded.classifier, loaded.description, make_objective("poly", epsilon=epsilon)))
    return str(folder)


def conjugate(world: Path, model: str, out: str, *more: str) -> int:
    images = ["--images", f"{world}/images", "--out", f"{world}/{out}", "--batch", "8"]
    return main(["adapt", "--model", model, *images, "--method", "conjugate", "--set", "window=8", *more])


def test_a_bundle_tells_the_method_which_loss_it_was_trained_with(
    world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, plain = poly_bundle(world), f"{world}/model.safetensors"
    by_hand = ["--set", "source_loss=poly", "--set", "epsilon=2"]
    assert conjugate(world, bundle, "told") == 0
    assert "source_loss is poly, epsilon is 2.0, as the bundle was trained" in capsys.readouterr().out
    assert conjugate(world, bundle, "same", *by_hand) == 0
    assert conjugate(world, bundle, "preset", "--preset", "poly-digits", "--set", "epsilon=2", "--set", "lr=1e-3") == 0
    assert conjugate(world, plain, "by_hand", *by_hand) == 0
    assert conjugate(world, plain, "ce") == 0
    tables = {out: (world / out / "predictions.csv").read_bytes() for out in ("told", "same", "by_hand", "ce")}
    assert tables["told"] == tables["same"] == tables["by_hand"] != tables["ce"]
    options = Record.load(world / "told/record.json").provenance["settings"]["options"]
    assert (options["source_loss"], options["epsilon"]) == ("poly", 2.0)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--set", "source_loss=ce"], "source_loss=ce contradicts the bundle, which was trained with source_loss=poly"),
        (["--set", "epsilon=6"], "epsilon=6.0 contradicts the bundle, which was trained with epsilon=2.0"),
        (["--preset", "poly-digits"], "epsilon=6.0 contradicts the bundle, which was trained with epsilon=2.0"),
    ],
)
def test_options_that_contradict_the_bundle_are_refused(
    more: list[str], message: str, world: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert conjugate(world, poly_bundle(world), "out", *more) == 2
    assert message in capsys.readouterr().err
    assert not (world / "out").exists()


def test_a_bundle_says_nothing_to_methods_without_such_options(world: Path) -> None:
    images = ["--images", f"{world}/images", "--out", f"{world}/out"]
    assert main(["adapt", "--model", poly_bundle(world), *images, "--method", "bn"]) == 0
    assert Record.load(world / "out/record.json").provenance["settings"]["options"] == {}


def test_the_written_weights_are_those_that_predict(world: Path) -> None:
    images = ["--images", f"{world}/images", "--out", f"{world}/out", "--batch", "8", "--set", "window=8"]
    source = f"{world}/model.safetensors"
    assert main(["adapt", "--model", source, *images, "--method", "t3a"]) == 0
    adapter = adapt(load_model(source).classifier, "t3a", window=8)
    stream = FolderStream(world / "images", list_images(world / "images"), 8, (16, 16), 3, 1.0, lambda *_: None)
    for images_of_batch, _ in stream:
        adapter(images_of_batch)
    written = load_model(f"{world}/out/adapted.safetensors").classifier
    assert written.fingerprint() == adapter.adapted().fingerprint() != adapter.classifier.fingerprint()


@pytest.mark.parametrize("there", [True, False])
def test_a_checkpoint_comes_back_to_the_device_it_was_on(
    there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.save({"settings": {"device": "cuda"}}, tmp_path / "progress.pt")
    load, asked = torch.load, []

    def loading(path: Path, *, map_location: object = None, weights_only: bool) -> object:
        asked.append(map_location)
        return load(path, map_location=map_location, weights_only=weights_only)

    monkeypatch.setattr(torch, "load", loading)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    with pytest.raises(ValueError, match="device: cuda there, cpu now"):
        saved_progress(tmp_path, {"device": "cpu"}, (), lambda _: None)
    assert asked == [None if there else "cpu"]  # without the device, the settings say that it was another one


def test_anchors_are_inferred_of_a_head_with_a_row_of_zeros_too(world: Path) -> None:
    loaded = load_model(f"{world}/model.safetensors")
    with torch.no_grad():
        loaded.classifier.head.weight[1] = 0
    save_model(world / "model.safetensors", loaded.classifier.model, loaded.description)
    assert main(command(world, "out")) == 0
