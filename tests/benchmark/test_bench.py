"""`ttac bench`: what an experiment's file may say, what runs again and what does not, and what a record tells."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ttac
import ttac.benchmark.job
from bench_helpers import TINY, InlineExecutor, shared_cache, write_experiment
from data_helpers import read_data
from ttac.benchmark.experiment import EXPERIMENTS, find_experiments, load_experiment
from ttac.benchmark.job import Bench, BenchJob
from ttac.benchmark.runs import expand
from ttac.cli import main
from ttac.common.files import text_hash
from ttac.data.streams import Scenario, Stream, corrupted_domains
from ttac.evaluation.records import Record
from ttac.source.bundle import load_bundle, save_bundle

FEW = ("targets.C10-C.corruptions=[contrast]", "runs=[{methods: [test], protocol: N-O-SF}]")
RUNS = [
    f"{protocol}-{method}-{domain}-c10-c-5-seed-0"
    for protocol, method in (("n-o-sf", "test"), ("n-o-sf", "tent"), ("n-o-sl", "ttac"))
    for domain in ("gaussian-noise", "contrast")
]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(
        ttac.benchmark.job, "LocalProcesses", InlineExecutor
    )  # test_bench_processes.py has the real one
    return write_experiment(tmp_path / "experiments")


@pytest.fixture
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_cache(tmp_path_factory)


def bench(file: Path, cache: Path, *more: str) -> int:
    return main(["bench", str(file), "--out", str(file.parents[1] / "out"), "--cache", str(cache), *more])


def folder(file: Path) -> Path:
    return file.parents[1] / "out/small/tiny"


def source_of(file: Path, cache: Path) -> Path:
    return Bench(BenchJob(file, file.parent, cache=cache)).prerequisites.bundle("plain")


def saved(file: Path) -> dict[str, Record]:
    """Read the records by the run's name."""
    others = ("experiment.json", ".failed.json", ".tsne.json")
    paths = [path for path in folder(file).iterdir() if not path.name.endswith(others)]
    return {path.stem: Record.load(path) for path in sorted(paths)}


def outcome(record: Record) -> tuple[Any, ...]:
    """Give what must not change when a run is done again: everything but times and memory."""
    return record.error, record.cumulative_error, record.class_error, record.counters, record.domain_error


def moments(place: Path) -> dict[str, int]:
    return {str(path): path.stat().st_mtime_ns for path in place.rglob("*")}


# What a file may say


def test_layers_lie_over_one_another(file: Path) -> None:
    (file.parent / "scales").mkdir()
    (file.parent / "scales/tiny.yaml").write_text("seeds: [7]\nepochs: 9\noptions: {window: 5, bn_clip: 3}\n")
    found = load_experiment(file, "tiny", ["targets.C10-C.samples=30", "seeds=[1, 2]", "options.queue=null"])
    assert found.epochs == 9  # of all experiments at the scale
    assert found.options == {"window": 20, "passes": 1, "bn_clip": 3}  # the file's own over the scale's, less one
    assert found.seeds == [1, 2]
    assert found.targets["C10-C"].samples == 30
    assert found.targets["C10-C"].corruptions == ["gaussian_noise", "contrast"]
    assert [run.seed for run in expand(found)][:4] == [1, 1, 2, 2]


def test_null_takes_a_key_out_at_any_depth(file: Path) -> None:
    found = load_experiment(file, "cpu")
    assert list(found.targets) == ["digits"]
    assert found.targets["digits"].samples is None
    new = load_experiment(file, "tiny", ["method_options={ttac: {lr: null}, bn: null}"])
    assert new.method_options == {"ttac": {}}


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("surprise=1", "surprise"),
        ("targets.C10-C.surprise=1", "surprise"),
        ("sources.plain.surprise=1", "surprise"),
        ("sources.plain.strong=2", "strong must be from 0 to 1, not 2"),
        ("runs=[{methods: [test], protocol: N-O-SF, surprise: 1}]", "surprise"),
        ("options.surprise=1", "option of any method: 'surprise'"),
        ("method_options.ttac.windo=1", "did you mean window?"),
        ("method_options.tac={}", "did you mean ttac"),
        ("method_seeds.tac=[1]", "did you mean ttac"),
        ("protocol_samples.N-O=1", "unknown protocol 'N-O'"),
        ("published=[protocol]", "did you mean protocols?"),
        ("runs=[{methods: [tac], protocol: N-O-SF}]", "unknown method: 'tac'"),
        ("runs=[{methods: [test], protocol: N-O}]", "unknown protocol 'N-O'"),
        ("runs=[{methods: [test], protocol: N-O-SF, source: plan}]", "unknown source of the experiment: 'plan'"),
        ("runs=[{methods: [test], protocol: N-O-SF, targets: [C10]}]", "unknown target of the experiment: 'C10'"),
        ("runs=[{methods: [tent], protocol: N-O-SF, options: {tau: 1}}]", "unknown option of tent: 'tau'"),
        ("runs=[{methods: [tent], protocol: N-O-SF, grid: {tau: [1]}}]", "unknown option of tent: 'tau'"),
        ("runs=[{methods: [ttt-r], protocol: N-O-SF}]", "TTT-R is not defined under N-O-SF"),
        ("targets.C10-C.corruptions=[fogg]", "did you mean fog"),
        ("targets.C10-C.severities=[6]", "severities"),
        ("targets.C10-C.preset=papr", "did you mean paper"),
        ("targets.C10-C.sources={plan: plain}", "'plan'"),
        ("targets.C10-C.strength=[0.1]", "in place of severities"),
        ("targets.C10-C={severities: null, strength: [99]}", "gaussian_noise takes a number within ten times"),
        ("runs=[{methods: [tent], protocol: N-O-SF, preset: deep}]", "unknown preset of tent: 'deep'"),
        ("runs=[{methods: [test], protocol: N-O-SF, source: [plain, plan]}]", "'plan'"),
        ("runs=[{methods: [test], protocol: N-O-SF, tables: [harm]}]", "unknown table: 'harm'"),
        ("tables={harm: {title: Harm, against: bn}}", "unknown method of the runs: 'bn'"),
        ("tables={harm: {title: Harm, metric: hours}}", "hours"),
        ("sources.plain.amp=bf8", "bf8"),
        ("targets.C10-C.domains=[fog]", "not both"),
        ("targets.C10-C.samples=0", "samples must be at least 1, not 0"),
        ("targets.C10-C.samples=many", "many"),
        ("seeds=[-1]", "seeds must be at least 0, not -1"),
        ("seeds=0", "seeds"),
        ("seeds=[0, 0]", "two runs would be called n-o-sf-test-gaussian-noise-c10-c-5-seed-0"),
        ("seeds=[]", "the experiment has no runs"),
        ("epochs=0", "epochs must be at least 1"),
        ("options.seed=3", "the seed is no option here"),
        ("options.window=0", "window"),
        ("sources.plain.arch=null", "the source plain needs arch, or init"),
        ("sources.a={data: digits, init: b}", "unknown source that a starts from: 'b'"),
        ("sources={a: {data: digits, init: b}, b: {data: digits, init: a}}", "the source a starts from itself"),
        ("metric=hours", "hours"),
        ("figures=[pie]", "pie"),
        ('row="{tilte}"', "a place can name"),
        ('row="{title.x}"', "a place can name"),
        ('column="{domain"', "a place can name"),
        ("title=null", "title"),
        ("runs.0.protocol=N-O-SL", "runs"),
        ("seeds", "dotted.path=value"),
        ("a..b=1", "dotted.path=value"),
        ("seeds=[", "is not YAML"),
    ],
)  # fmt: skip
def test_mistakes_are_named_before_anything_is_written(
    override: str, named: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(file, tmp_path / "cache", "--set", override) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert named in said
    assert [path.name for path in tmp_path.iterdir()] == ["experiments"]


def test_experiments_go_by_their_names_from_any_folder(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "order", "rates", "--scale", "tiny", "--cache", str(cache), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "Order of the stream (tiny)" in said
    assert "Learning rates (tiny)" in said
    assert not list(tmp_path.iterdir())
    write_experiment(tmp_path / "mine")
    found = find_experiments(["mine/small.yaml", "all", "order"])
    assert found[0] == Path("mine/small.yaml")
    assert len(found) == len(set(found)) == 1 + len(list(EXPERIMENTS.glob("*.yaml")))


def test_records_name_the_command_that_goes_anywhere(tmp_path: Path, cache: Path) -> None:
    mine = str(write_experiment(tmp_path / "mine"))
    for word, shown in ("order", "order"), (str(EXPERIMENTS / "order.yaml"), "order"), (mine, mine):
        (found,) = find_experiments([word])
        bench = Bench(BenchJob(found, tmp_path / "out", cache=cache))
        bench.describe()
        described = json.loads((bench.folder / "experiment.json").read_text())
        assert described["command"] == f"ttac bench {shown} --scale tiny"


@pytest.mark.parametrize("word", ["protcols", "experiments/protocols.yaml"])
def test_unknown_experiments_are_told_with_those_that_there_are(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", word]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: no experiment {word}; did you mean protocols? known: all, ablation, ")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("- 1", "must be a mapping"),
        ("a: [", "is not YAML"),
        (TINY.replace("tiny: {}", "tiny: [1]"), "scales must be a mapping"),
        (TINY.replace("tiny: {}", "tiny: {}\n  huge: {}"), "scales must be a mapping"),
        (TINY.replace("tiny: {}", "paper: {}"), "unknown scale of"),
    ],
)
def test_files_that_are_no_experiment(
    text: str, named: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(text)
    assert bench(file, tmp_path / "cache") == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--shard", "3/2"], "--shard"),
        (["--shard", "0/2"], "--shard"),
        (["--shard", "half"], "--shard"),
        (["--only", "*shot*"], "no run is called *shot*"),
        (["--source", "plain"], "--source"),
        (["--source", "plan=here"], "unknown source of the experiment: 'plan'"),
        (["--source", "plain=nowhere"], "no bundle of ttac train in nowhere"),
        (["--set", "sources.plain.data=nowhere"], "no folder nowhere"),  # found as it is trained: no run is left
        (["--set", "targets.C10-C.data=nowhere"], "no folder nowhere"),
    ],
)
def test_mistakes_of_the_command_line(
    arguments: list[str], named: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(file, tmp_path / "cache", *arguments) == 2
    assert named in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_row_may_tell_runs_of_a_grid_apart(file: Path) -> None:
    entry = "{methods: [tent], protocol: N-O-SF, grid: {lr: [0.1, 0.2], passes: [1, 2]}"
    with pytest.raises(ValueError, match="two runs would be called"):
        expand(load_experiment(file, "tiny", [f"runs=[{entry}}}]"]))
    row = "{title} {lr} {passes}"
    runs = expand(load_experiment(file, "tiny", [f"runs=[{entry}, row: '{row}'}}]"]))
    assert [run.row for run in runs][::2] == ["TENT 0.1 1", "TENT 0.1 2", "TENT 0.2 1", "TENT 0.2 2"]
    assert runs[2].options == {"window": 20, "queue": 0, "lr": 0.1, "passes": 2}


def test_an_entry_may_name_several_sources_and_a_preset(file: Path) -> None:
    other = "sources.other={data: digits, init: plain}"
    preset = "targets.C10-C.preset=paper"  # of those that have it, where an entry names none
    many = "{methods: [ttac, ttac++], protocol: N-O-SL, source: [plain, other], column: '{source}'}"
    fast = "{methods: [ttac], protocol: N-O-SL, preset: fast, options: {queue: 4096}, row: fast, column: '{source}'}"
    found = expand(load_experiment(file, "tiny", [other, preset, f"runs=[{many}, {fast}]"]))
    assert [(run.source, run.method, run.preset) for run in found][::2] == [
        ("plain", "ttac", "paper"), ("plain", "ttac++", "paper"), ("other", "ttac", "paper"),
        ("other", "ttac++", "paper"), ("plain", "ttac", "fast"),
    ]  # fmt: skip
    assert [run.column for run in found][::2] == ["plain", "plain", "other", "other", "plain"]


def test_keys_that_sources_had_not_before_leave_their_place_as_it_was(file: Path, cache: Path) -> None:
    def place(*overrides: str) -> Path:
        return Bench(BenchJob(file, file.parent, "tiny", overrides, cache=cache)).prerequisites.bundle("plain")

    recipe = {
        "data": "digits", "arch": "resnet8", "arch_options": {"width": 4, "stem_stride": 2}, "objective": "ce",
        "init": None, "epochs": 1, "batch": 64, "lr": 0.1, "weight_decay": 0.0005, "seed": 0, "size": None,
    }  # fmt: skip
    assert place() == cache / "sources" / f"plain-{text_hash([str(recipe)])}"
    others = [place(f"sources.plain.{key}") for key in ("amp=bf16", "strong=0.5", "channels_last=true")]
    assert len({place(), *others}) == 4
    usual = [f"sources.plain.{key}" for key in ("amp=auto", "strong=0.0", "channels_last=false")]
    assert place(*usual) == place()


# What runs, and what runs again


def test_some_runs_alone_can_be_done(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(file, cache, "--only", "*-test-*", "*-tent-contrast-*") == 0
    done = [name for name in RUNS if "-test-" in name or "-tent-contrast-" in name]
    assert sorted(saved(file)) == sorted(done)
    assert json.loads((folder(file) / "experiment.json").read_text())["runs"] == RUNS
    assert bench(file, cache, "--only", "*contrast*", "--shard", "2/2") == 0  # of test, tent and ttac
    assert "0 runs, 1 done before" in capsys.readouterr().out
    assert sorted(saved(file)) == sorted(done)


def test_a_strength_reaches_the_stream(file: Path, cache: Path) -> None:
    target = "targets.C10-C={corruptions: [jpeg_compression], severities: null, strength: [30]}"
    assert bench(file, cache, "--set", target, FEW[1]) == 0
    (record,) = saved(file).values()
    assert record.provenance["run"]["data"]["strength"] == [30]
    (domain,) = record.provenance["stream"]["domains"]
    assert (domain["name"], domain["strength"]) == ("jpeg_compression", [30])


def test_what_has_a_record_is_left_alone(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(file, cache) == 0
    assert sorted(saved(file)) == sorted(RUNS)
    assert json.loads((folder(file) / "experiment.json").read_text())["runs"] == RUNS
    before = moments(file.parents[1])
    capsys.readouterr()
    assert bench(file, cache) == 0
    assert capsys.readouterr().out == "A small one: 0 runs, 6 done before\n"
    assert moments(file.parents[1]) == before


def test_a_run_that_is_done_again_ends_the_same(file: Path, cache: Path) -> None:
    more = ["--set", "runs=[{methods: [shot, self-training, adacontrast, ttac++], protocol: N-O-SF}]"]
    more += ["--set", "targets.C10-C.corruptions=[contrast]"]
    assert bench(file, cache, *more) == 0
    before = saved(file)
    assert len(before) == 4
    for name in before:
        if "shot" not in name:
            (folder(file) / f"{name}.json").unlink()
    torch.manual_seed(12345)  # which no run may depend on, nor on what ran before
    (kept,) = folder(file).glob("*shot*")
    moment = kept.stat().st_mtime_ns
    assert bench(file, cache, *more) == 0
    after = saved(file)
    assert {name: outcome(after[name]) for name in after} == {name: outcome(before[name]) for name in before}
    assert kept.stat().st_mtime_ns == moment


def test_a_record_is_that_of_the_library(file: Path, cache: Path) -> None:
    assert bench(file, cache, "--set", "seeds=[3]", "targets.C10-C.corruptions=[contrast]") == 0
    source = source_of(file, cache)
    found = {record.provenance["run"]["method"]: record for record in saved(file).values()}
    for method, protocol in (("test", "N-O-SF"), ("tent", "N-O-SF"), ("ttac", "N-O-SL")):
        bundle = load_bundle(source)
        clean = read_data("digits", split="test")
        chosen = torch.randperm(len(clean), generator=torch.Generator().manual_seed(0))[:60].sort().values
        domains = corrupted_domains(clean.subset(chosen), ["contrast"], (5,), seed=0)
        options = {} if method == "test" else {"window": 20, "queue": 0, "passes": 1}
        stats = bundle.statistics if method == "ttac" else None
        adapter = ttac.adapt(bundle.classifier, method, stats=stats, seed=3, **options)
        expected = ttac.evaluate(adapter, Stream(domains, Scenario(batch=20, seed=3), prefetch=0), protocol)
        assert outcome(found[method]) == outcome(expected), method
        assert found[method].provenance["stream"] == expected.provenance["stream"]


def test_records_of_other_settings_are_refused(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", *FEW]
    assert bench(file, cache, *few) == 0
    before = moments(file.parents[1])
    for change, named in (("targets.C10-C.batch=10", "'batch': 20"), ("sources.plain.seed=4", "'seed': 4")):
        assert bench(file, cache, *few, "--set", change) == 2
        said = capsys.readouterr().err
        assert "is of another run" in said
        assert named in said
    assert moments(file.parents[1]) == before


def test_settings_that_are_gone_do_not_make_a_record_another(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--set", *FEW]
    assert bench(file, cache, *few) == 0
    (path,) = folder(file).glob("n-o-sf-*")
    content = json.loads(path.read_text())
    content["provenance"]["run"]["compile"] = None  # of versions that compiled
    path.write_text(json.dumps(content))
    capsys.readouterr()
    assert bench(file, cache, *few) == 0
    assert "0 runs, 1 done before" in capsys.readouterr().out


def test_records_of_other_weights_are_refused(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", "targets.C10-C.corruptions=[contrast]", "runs=[{methods: [test, bn], protocol: N-O-SF}]"]
    assert bench(file, cache, *few) == 0
    source = source_of(file, cache)
    bundle = load_bundle(source)
    with torch.no_grad():
        bundle.classifier.head.bias.add_(1)
    ours, other = bundle.classifier.fingerprint(), file.parents[1] / "other"
    save_bundle(other, ttac.source.bundle.Bundle(bundle.classifier, bundle.description, bundle.objective))
    assert bench(file, cache, *few, "--source", f"plain={other}") == 2
    assert f"there, {{'bundle': '{ours}'}} now" in capsys.readouterr().err
    # Nothing is added to records of others.
    out = folder(file)
    shutil.rmtree(out)
    assert bench(file, cache, *few, "--source", f"plain={other}") == 0
    next(out.glob("*bn*")).unlink()
    before = moments(out)
    assert bench(file, file.parents[1] / "new-cache", *few) == 2
    assert f"training: {{'bundle': '{ours}'}} there" in capsys.readouterr().err
    assert moments(out) == before
    assert f"--source plain={other}" in json.loads((out / "experiment.json").read_text())["command"]
    # The same recipe need not give the same weights elsewhere.
    shutil.rmtree(out)
    assert bench(file, cache, *few) == 0
    next(out.glob("*bn*")).unlink()
    path = next(out.glob("n-o-sf-test*"))
    path.write_text(path.read_text().replace(load_bundle(source).classifier.fingerprint(), "0" * 32))
    assert bench(file, cache, *few) == 2
    assert f"weights: {'0' * 32} there" in capsys.readouterr().err


def test_a_source_is_known_by_those_that_it_starts_from(file: Path, cache: Path) -> None:
    chain = "sources={old: {data: digits, arch: resnet8, epochs: 1}, plain: {arch: null, init: old}}"
    settings = [
        Bench(BenchJob(file, file.parent, "tiny", (chain, f"sources.old.epochs={epochs}"), cache=cache))
        for epochs in (1, 2)
    ]
    first, second = (bench.settings(bench.runs[0])["training"] for bench in settings)
    assert first["init"] == {"data": "digits", "arch": "resnet8", "epochs": 1}
    assert first != second


def test_a_source_may_see_strong_views(file: Path, cache: Path) -> None:
    plain, none, half = (
        Bench(BenchJob(file, file.parent, "tiny", overrides, cache=cache)).prerequisites
        for overrides in ((), ("sources.plain.strong=0",), ("sources.plain.strong=0.5",))
    )
    assert plain.bundle("plain") == none.bundle("plain") != half.bundle("plain")
    assert half.training("plain") == {**plain.training("plain"), "strong": 0.5}
    few = ["--set", "sources.plain.strong=0.5", "runs=[{methods: [test], protocol: N-O-SF}]"]
    assert bench(file, cache, *few) == 0
    assert load_bundle(half.bundle("plain")).training["settings"]["strong"] == 0.5


def test_a_bundle_without_statistics_is_not_taken_for_one_with_them(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(file, cache, "--set", "runs=[{methods: [test], protocol: N-O-SF}]") == 0
    source = source_of(file, cache)
    bundle, other = load_bundle(source), file.parents[1] / "other"
    save_bundle(other, ttac.source.bundle.Bundle(bundle.classifier, bundle.description, bundle.objective))
    ttac_alone = ["--set", "runs=[{methods: [ttac], protocol: N-O-SL}]", "--source", f"plain={other}"]
    assert bench(file, cache, *ttac_alone) == 2
    assert "no statistics of source images" in capsys.readouterr().err


def test_a_damaged_record_is_named(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--set", *FEW]
    assert bench(file, cache, *few) == 0
    (path,) = folder(file).glob("n-o-sf-*")
    for text in ("{", '{"format": "ttac.record/1"}', "[]", path.read_text().replace('"run"', '"ran"')):
        path.write_text(text)
        assert bench(file, cache, *few) == 2
        assert f"error: {path} is no record of a run, or damaged: delete it" in capsys.readouterr().err


def test_a_run_that_fails_stops_no_other(file: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    later = file.parents[1] / "later"
    targets = "{C10-C: {corruptions: [contrast]}, much: {data: digits, samples: 5000}, later: {data: LATER}}"
    text = TINY.replace("tiny: {}", f"tiny: {{targets: {targets.replace('LATER', str(later))}}}")
    file.write_text(text.replace("[test, tent]", "[test]").replace("  - {methods: [ttac], protocol: N-O-SL}\n", ""))
    assert bench(file, cache) == 2
    said = capsys.readouterr()
    assert f"error: 2 of 3 runs failed, the first one with: FileNotFoundError: no folder {later}" in said.err
    assert "n-o-sf-test-much-seed-0 failed: ValueError: 5000 images are wanted, and there are 1000" in said.out
    assert list(saved(file)) == ["n-o-sf-test-contrast-c10-c-5-seed-0"]
    failure = json.loads((folder(file) / "n-o-sf-test-much-seed-0.failed.json").read_text())
    assert failure["format"] == "ttac.failure/1"
    assert failure["error"] == "ValueError: 5000 images are wanted, and there are 1000"
    assert failure["run"]["target"] == "much"
    assert failure["torch"] == torch.__version__
    lacking = json.loads((folder(file) / "n-o-sf-test-later-seed-0.failed.json").read_text())
    assert "Traceback" in lacking["traceback"]
    later.mkdir()
    np.save(later / "images.npy", np.zeros((30, 32, 32, 1), dtype=np.uint8))
    np.save(later / "labels.npy", np.arange(30) % 10)
    assert bench(file, cache) == 2
    assert "error: 1 of 2 runs failed" in capsys.readouterr().err
    assert saved(file)["n-o-sf-test-later-seed-0"].error == pytest.approx(90)  # images that are all the same
    assert [path.name for path in folder(file).glob("*.failed.json")] == ["n-o-sf-test-much-seed-0.failed.json"]


def test_a_source_that_cannot_be_trained_stops_its_own_runs_alone(
    file: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--set", "sources.lost={data: nowhere, arch: resnet8}", "targets.C10-C.corruptions=[contrast]", "--set"]
    more += ["runs=[{methods: [bn], source: lost, protocol: N-O-SF}, {methods: [test], protocol: N-O-SF}]"]
    assert bench(file, cache, *more) == 2
    assert (
        "error: 1 of 2 runs failed, the first one with: FileNotFoundError: no folder nowhere" in capsys.readouterr().err
    )
    assert list(saved(file)) == ["n-o-sf-test-contrast-c10-c-5-seed-0"]
    (failure,) = folder(file).glob("*.failed.json")
    assert failure.name == "n-o-sf-bn-contrast-c10-c-5-seed-0.failed.json"


# What a record tells


def test_a_record_tells_what_made_it(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--set", "targets.C10-C.corruptions=[contrast]", "seeds=[4]", "runs=[{methods: [ttac], protocol: N-M-SL}]"]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/ttac", "bench", str(file), *more])
    assert bench(file, cache, *more) == 0
    (record,) = saved(file).values()
    told = record.provenance
    source = source_of(file, cache)
    assert told["model"] == load_bundle(source).classifier.fingerprint()
    assert told["settings"]["statistics"] == load_bundle(source).statistics.fingerprint()
    assert told["command"].startswith(f"ttac bench {file} --set ")
    assert (told["torch"], told["threads"]) == (torch.__version__, torch.get_num_threads())
    for key in ("ttac", "commit", "python", "numpy", "pillow", "platform", "processor", "cpus", "time", "protocol"):
        assert key in told, key
    assert told["epochs"] == 3
    assert told["stream"]["domains"][0]["data"]  # the hash of the images
    assert told["stream"]["scenario"]["seed"] == 4
    assert (record.samples, told["method"], told["options"]["seed"]) == (60, "ttac", 4)
    assert (told["predict"], told["reset"], told["samples_before"]) == ("after", "fresh", 0)
    run = told["run"]
    assert {key: run[key] for key in ("experiment", "scale", "group", "row", "column", "source", "target")} == {
        "experiment": "small", "scale": "tiny", "group": "N-M-SL", "row": "TTAC", "column": "contrast",
        "source": "plain", "target": "C10-C",
    }  # fmt: skip
    assert {key: run[key] for key in ("domain", "severity", "seed", "statistics", "epochs", "samples", "options")} == {
        "domain": "contrast", "severity": 5, "seed": 4, "statistics": "collected", "epochs": 3, "samples": 60,
        "options": {"window": 20, "queue": 0, "passes": 1},
    }  # fmt: skip
