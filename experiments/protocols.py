"""All methods under all six protocols on `cifar10-jpg`: one table a protocol, without a sample queue.

    python experiments/protocols.py --data DIR --out results/protocols

`DIR` holds `{train,test}_{images,labels}.npy`. The plain source model is that of `cifar10_jpg.py`; two more start from
it and are trained with a contrastive and with a rotation branch for three epochs (about 25 minutes each on one core). A
run whose record exists is not run again, so an interrupted command goes on, and `--protocols`, `--shifts` and
`--methods` let processes share the work. Learning rates that are not the published ones were chosen on the shifts in
`KEPT` alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cifar10_jpg import CLASSES, MEAN, SHIFTS, STD, batches, load, shifted, source_model
from jsonargparse import auto_cli
from torch import Tensor

import ttac
from ttac.data import shifts
from ttac.methods.registry import methods
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.models import ModelDescription
from ttac.source.objectives import make_objective
from ttac.source.train import Recipe, train_source

# Never in a table: shifts to choose learning rates on.
KEPT: dict[str, shifts.Shift] = {
    "speckle noise": partial(shifts.speckle_noise, sigma=0.25),
    "pixelate": partial(shifts.pixelate, factor=0.5),
}
NO_QUEUE: dict[str, Any] = {"queue": 0, "passes": 1}
EPOCHS = 2  # of multi-pass protocols
BRANCH_RECIPE = Recipe(epochs=3, lr=0.05, seed=0)


@dataclass(frozen=True)
class Row:
    """One method in the table of a protocol."""

    method: str
    source: str = "plain"  # or the branch that the source model was trained with
    options: dict[str, Any] = field(default_factory=dict)


# Chosen on `KEPT`: rates among the published one and ten times as much, the weight among 0.1 and 0.5.
SHOT = {"lr": 0.01}
ADACONTRAST = {"lr": 0.002}
PLAIN = {"warmup": False}
CONTRASTIVE = {"contrastive_weight": 0.5}
BRANCHED = {**PLAIN, **CONTRASTIVE}
TABLES: dict[str, tuple[Row, ...]] = {
    "N-O-SF": (
        Row("test"),
        Row("bn"),
        Row("tent"),
        Row("t3a", options={"follow": True}),  # the paper's T3A has the error of BN, not of TEST
        Row("shot", options=SHOT),
        Row("conjugate"),
        Row("self-training"),
        Row("adacontrast", options=ADACONTRAST),
        Row("ttac", options=PLAIN),
        Row("ttac+shot", options=PLAIN),
        Row("ttac++", options=PLAIN),
    ),
    "N-O-SL": (Row("ttt++"), Row("ttac", options=PLAIN), Row("ttac+shot", options=PLAIN), Row("ttac++", options=PLAIN)),
    "Y-O-SL": (
        Row("test", "contrastive"),
        Row("ttt++", "contrastive", CONTRASTIVE),
        Row("ttac", "contrastive", BRANCHED),
        Row("ttac+shot", "contrastive", BRANCHED),
        Row("ttac++", "contrastive", BRANCHED),
    ),
    "N-M-SF": (
        Row("bn"),
        Row("tent"),
        Row("shot", options=SHOT),
        Row("self-training"),
        Row("adacontrast", options=ADACONTRAST),
        Row("ttac", options=PLAIN),
        Row("ttac+shot", options=PLAIN),
        Row("ttac++", options=PLAIN),
    ),
    "N-M-SL": (Row("ttt++"), Row("ttac", options=PLAIN), Row("ttac+shot", options=PLAIN), Row("ttac++", options=PLAIN)),
    "Y-M-SL": (
        Row("test", "rotation"),
        Row("ttt-r", "rotation"),
        Row("ttt++", "contrastive", CONTRASTIVE),
        Row("ttac", "contrastive", BRANCHED),
        Row("ttac+shot", "contrastive", BRANCHED),
        Row("ttac++", "contrastive", BRANCHED),
    ),
}


def source(name: str, data: Path, cache: Path) -> tuple[ttac.Classifier, ttac.SourceStatistics]:
    """Load a source model with its statistics, or train it: the plain one, or one with a branch that starts from it."""
    folder = cache / f"cifar10-jpg-{name}"
    if not folder.exists():
        classifier = source_model(data, cache)
        objective = make_objective("ce" if name == "plain" else f"ce+{name}")
        if name != "plain":
            torch.manual_seed(0)
            classifier.branch = objective.new_branch(classifier.feature_dim)
            train_source(classifier, *load(data, "train"), BRANCH_RECIPE, objective)
        statistics = ttac.SourceStatistics.collect(classifier, batches(*load(data, "train")))
        description = ModelDescription("resnet20", 10, 3, MEAN, STD, (32, 32), CLASSES)
        save_bundle(folder, Bundle(classifier, description, objective, statistics))
    bundle = load_bundle(folder)
    assert bundle.statistics is not None
    return bundle.classifier.to(memory_format=torch.channels_last), bundle.statistics  # type: ignore[call-overload]


def main(
    data: Path,
    out: Path = Path("results/protocols"),
    cache: Path = Path("out/cache"),
    protocols: list[str] | None = None,
    shifts: list[str] | None = None,
    methods: list[str] | None = None,
    samples: int = 10_000,
    seed: int = 0,
    threads: int = 1,
) -> None:
    """Run what has no record yet and write the tables of all that has one.

    Args:
        data: folder with the arrays of `cifar10-jpg`.
        out: folder for records and tables.
        cache: folder for the source models and their statistics.
        protocols: some of the protocols (default: all).
        shifts: some of the shifts (default: all that are evaluated).
        methods: some of the methods (default: all that the protocol admits).
        samples: length of the stream, or size of the target set.
        seed: order of the stream and draws of the shifts; the methods' own seed.
        threads: of torch.
    """
    torch.set_num_threads(threads)
    images, labels = load(data, "test")
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))[:samples]
    for shift in shifts or SHIFTS:
        target = shifted(images[order], {**SHIFTS, **KEPT}[shift], seed)
        for protocol in protocols or TABLES:
            for row in TABLES[protocol]:
                path = (
                    out / f"{protocol}-{row.method.replace('+', 'p')}-{shift.replace(' ', '-')}-{samples}-{seed}.json"
                )
                if (methods is None or row.method in methods) and not path.exists():
                    record = run_one(row, protocol, data, cache, target, labels[order], seed, shift)
                    record.save(path)
                    print(
                        f"{protocol} {shift:15} {row.method:14} {record.error:6.2f} % {record.seconds:6.0f} s",
                        flush=True,
                    )
    write_tables(out)


def run_one(
    row: Row, protocol: str, data: Path, cache: Path, images: Tensor, labels: Tensor, seed: int, domain: str
) -> ttac.Record:
    """Evaluate one method on one domain."""
    classifier, collected = source(row.source, data, cache)
    known = methods()[row.method]
    stats = None
    if "statistics" in known.capabilities.needs:
        stats = ttac.SourceStatistics.infer(classifier) if protocol.endswith("SF") else collected
    queue = NO_QUEUE if hasattr(known.options_type, "queue") else {}
    adapter = ttac.adapt(classifier, row.method, stats=stats, seed=seed, **queue, **row.options)
    multi = ttac.PROTOCOLS[protocol].passes == "multi"
    return ttac.evaluate(
        adapter,
        list(batches(images, labels)),
        protocol=protocol,
        epochs=EPOCHS if multi else None,
        notes={"data": "cifar10-jpg test", "domain": domain, "source": row.source, "stream_seed": seed},
    )


def write_tables(out: Path) -> None:
    """Write the errors of all records in `out`, a table for each protocol and number of samples."""
    records = [ttac.Record.load(path) for path in sorted(out.glob("*.json"))]
    text = f"# Six protocols on cifar10-jpg, ResNet-20\n\n{__doc__}"
    for protocol in TABLES:
        for length in sorted({r.samples for r in records if r.provenance["protocol"] == protocol}, reverse=True):
            chosen = [r for r in records if r.provenance["protocol"] == protocol and r.samples == length]
            text += f"\n## {protocol}, n = {length}\n\n" + "\n".join(table(chosen, protocol)) + "\n"
    (out / "README.md").write_text(text)
    print(text)


def table(records: list[ttac.Record], protocol: str) -> Iterator[str]:
    """Lay out errors, their mean and the time a sample in Markdown."""
    found = {(record.provenance["method"], record.provenance["domain"]): record for record in records}
    domains = [name for name in SHIFTS if any(domain == name for _, domain in found)]
    yield f"| error (%) | source model | predicts | {' | '.join(domains)} | mean | seconds a sample |"
    yield "|---" * (len(domains) + 5) + "|"
    for row in TABLES[protocol]:
        own = [found[row.method, domain] for domain in domains if (row.method, domain) in found]
        if len(own) == len(domains):
            errors = [record.error for record in own if record.error is not None]
            cells = [methods()[row.method].capabilities.title, row.source, own[0].provenance["predict"]]
            cells += [f"{error:.2f}" for error in errors]
            cells += [f"{sum(errors) / len(errors):.2f}"]
            cells += [f"{sum(record.seconds for record in own) / sum(record.samples for record in own):.4f}"]
            yield f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    auto_cli(main, as_positional=False)
