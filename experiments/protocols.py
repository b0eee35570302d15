"""All methods under all six protocols on `cifar10-jpg`: one table a protocol, without a sample queue.

    python experiments/protocols.py --data DIR --out results/protocols

`DIR` holds `{train,test}_{images,labels}.npy`. The plain source model is trained for 24 epochs (an hour on two cores);
two more start from it and are trained with a contrastive and a rotation branch for three epochs (25 minutes each on
one core). A run whose record exists with the same options is not run again, so an interrupted command goes on, and
`--protocols`, `--shifts` and `--methods` let processes share the work. Learning rates that are not the published ones
were chosen on the shifts in `KEPT` alone. Multi-pass protocols learn for two epochs. Tables of less than 10,000 samples
are made with `--samples`. Seconds are those of one thread, on a machine that may have done other work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import shifts
import torch
from jsonargparse import auto_cli
from torch import Tensor

import ttac
from ttac.data.sets.specs import get_spec
from ttac.methods.base import Adapter
from ttac.methods.registry import methods
from ttac.source.bundle import Bundle, load_bundle, save_bundle
from ttac.source.models import ModelDescription
from ttac.source.networks import ResNet
from ttac.source.objectives import make_objective
from ttac.source.train import Recipe, train_source

CIFAR10 = get_spec("cifar10-jpg")
SHIFTS: dict[str, shifts.Shift] = {
    "gaussian noise": partial(shifts.gaussian_noise, sigma=0.10),
    "impulse noise": partial(shifts.impulse_noise, share=0.08),
    "blur": partial(shifts.blur, sigma=1.3),
    "contrast": partial(shifts.low_contrast, factor=0.15),
    "fog": partial(shifts.fog, strength=1.5),
}
# Never in a table: shifts to choose learning rates on.
KEPT: dict[str, shifts.Shift] = {
    "speckle noise": partial(shifts.speckle_noise, sigma=0.25),
    "pixelate": partial(shifts.pixelate, factor=0.5),
}
NO_QUEUE: dict[str, Any] = {"queue": 0, "passes": 1}
EPOCHS = 2  # of multi-pass protocols
PLAIN_RECIPES = (Recipe(epochs=16), Recipe(epochs=8, lr=0.06, weight_decay=1e-4, seed=1))
BRANCH_RECIPES = (Recipe(epochs=3, lr=0.05),)


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
ALIGNED = (Row("ttt++"), *(Row(method, options=PLAIN) for method in ("ttac", "ttac+shot", "ttac++")))
WITH_BRANCH = (
    Row("ttt++", "contrastive", CONTRASTIVE),
    *(Row(method, "contrastive", BRANCHED) for method in ("ttac", "ttac+shot", "ttac++")),
)
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
        *ALIGNED[1:],
    ),
    "N-O-SL": ALIGNED,
    "Y-O-SL": (Row("test", "contrastive"), *WITH_BRANCH),
    "N-M-SF": (
        Row("bn"),
        Row("tent"),
        Row("shot", options=SHOT),
        Row("self-training"),
        Row("adacontrast", options=ADACONTRAST),
        *ALIGNED[1:],
    ),
    "N-M-SL": ALIGNED,
    "Y-M-SL": (Row("test", "rotation"), Row("ttt-r", "rotation"), *WITH_BRANCH),
}


def load(data: Path, split: str) -> tuple[Tensor, Tensor]:
    """Read images `[N, 3, 32, 32]` uint8 and labels `[N]` of a split."""
    images = torch.from_numpy(np.load(data / f"{split}_images.npy")).permute(0, 3, 1, 2).contiguous()
    return images, torch.from_numpy(np.load(data / f"{split}_labels.npy")).long()


def source(name: str, data: Path, cache: Path) -> tuple[ttac.Classifier, ttac.SourceStatistics]:
    """Load a source model with its statistics, or train it: the plain one, or one with a branch that starts from it."""
    folder = cache / f"cifar10-jpg-{name}"
    if not folder.exists():
        objective = make_objective("ce" if name == "plain" else f"ce+{name}")
        torch.manual_seed(0)
        if name == "plain":
            network = ResNet(20, CIFAR10.num_classes).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            classifier = ttac.Classifier(network, mean=CIFAR10.mean, std=CIFAR10.std)
        else:
            classifier, _ = source("plain", data, cache)
            classifier.branch = objective.new_branch(classifier.feature_dim)
        for recipe in PLAIN_RECIPES if name == "plain" else BRANCH_RECIPES:
            train_source(classifier, *load(data, "train"), recipe, objective)
        statistics = ttac.SourceStatistics.collect(classifier, batches(*load(data, "train")))
        description = ModelDescription(
            "resnet20", CIFAR10.num_classes, 3, CIFAR10.mean, CIFAR10.std, CIFAR10.size, CIFAR10.classes
        )
        save_bundle(folder, Bundle(classifier, description, objective, statistics))
    bundle = load_bundle(folder)
    assert bundle.statistics is not None
    return bundle.classifier.to(memory_format=torch.channels_last), bundle.statistics  # type: ignore[call-overload]


def batches(images: Tensor, labels: Tensor, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
    """Cut uint8 images into arrival batches in [0, 1]."""
    for part, truth in zip(images.split(size), labels.split(size), strict=True):
        yield part.float() / 255, truth


def shifted(images: Tensor, shift: shifts.Shift, seed: int) -> Tensor:
    """Apply a shift in parts and store it as an 8-bit camera would."""
    generator = torch.Generator().manual_seed(seed)
    parts = [shift(part.float() / 255, generator) for part in images.split(500)]
    return torch.cat([(part * 255).round().clamp(0, 255).byte() for part in parts])


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
    images, labels = images[order], labels[order]
    for name in ("plain", "contrastive", "rotation"):
        adapter = ttac.adapt(source(name, data, cache)[0], "test", seed=seed)
        run_one(out / f"clean-{name}-{samples}-{seed}.json", adapter, "N-O-SF", images, labels, seed, "clean", name)
    for shift in shifts or SHIFTS:
        target = shifted(images, {**SHIFTS, **KEPT}[shift], seed)
        for protocol in protocols or TABLES:
            for row in TABLES[protocol]:
                if methods is None or row.method in methods:
                    name = f"{protocol}-{row.method.replace('+', 'p')}-{shift.replace(' ', '-')}-{samples}-{seed}.json"
                    adapter = make_adapter(row, protocol, data, cache, seed)
                    run_one(out / name, adapter, protocol, target, labels, seed, shift, row.source)
    write_tables(out)


def make_adapter(row: Row, protocol: str, data: Path, cache: Path, seed: int) -> Adapter:
    """Make the adapter of a row, without a queue."""
    classifier, collected = source(row.source, data, cache)
    known = methods()[row.method]
    stats = None
    if "statistics" in known.capabilities.needs:
        stats = ttac.SourceStatistics.infer(classifier) if protocol.endswith("SF") else collected
    queue = NO_QUEUE if hasattr(known.options_type, "queue") else {}
    return ttac.adapt(classifier, row.method, stats=stats, seed=seed, **queue, **row.options)


def run_one(
    path: Path, adapter: Adapter, protocol: str, images: Tensor, labels: Tensor, seed: int, domain: str, source: str
) -> None:
    """Evaluate one method on one domain unless its record is there."""
    if path.exists() and ttac.Record.load(path).provenance["options"] == dataclasses.asdict(adapter.options):
        return
    record = ttac.evaluate(
        adapter,
        list(batches(images, labels)),
        protocol=protocol,
        epochs=EPOCHS if ttac.PROTOCOLS[protocol].passes == "multi" else None,
        notes={"data": "cifar10-jpg test", "domain": domain, "source": source, "stream_seed": seed},
    )
    record.save(path)
    print(f"{protocol} {domain:15} {adapter.name:14} {record.error:6.2f} % {record.seconds:6.0f} s", flush=True)


def write_tables(out: Path) -> None:
    """Write the errors of all records in `out`, a table for each protocol and number of samples."""
    records = [ttac.Record.load(path) for path in sorted(out.glob("*.json"))]
    text = f"# Six protocols on cifar10-jpg, ResNet-20\n\n{__doc__}\n"
    for record in records:
        if record.provenance["domain"] == "clean":
            text += f"Clean error of the source model ({record.provenance['source']}): {record.error:.2f} %, "
            text += f"n = {record.samples}.\n"
    records = [record for record in records if record.provenance["domain"] != "clean"]
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
