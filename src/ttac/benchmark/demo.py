"""The demo: digits under strong shifts, every method on the same streams."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

from ttac.benchmark.jobs import DemoJob
from ttac.benchmark.report.figures import plot_cumulative_error
from ttac.data.corruptions import Corruption
from ttac.data.labelled import from_tensors
from ttac.data.sets.digits import load_digits
from ttac.data.sets.specs import get_spec
from ttac.data.streams import Domain, Scenario, Stream
from ttac.evaluation.engine import evaluate
from ttac.evaluation.records import Record
from ttac.methods.registry import adapt
from ttac.model.architectures import new_network
from ttac.model.classifier import Classifier
from ttac.model.pixel_check import PixelsWarning
from ttac.source.loading import ModelDescription, load_model, save_model
from ttac.source.spec import Recipe
from ttac.source.statistics import SourceStatistics
from ttac.source.train import train_source

SPEC = get_spec("digits")
EPOCHS = 15
ARRIVAL = 20  # images a batch; windows are filled across batches
# What is hard for a photograph of 32 x 32 is not for a digit, so most of these are stronger than severity 5.
SHIFTS = {
    "gaussian noise": Corruption("gaussian_noise", strength=(0.4,)),
    "impulse noise": Corruption("impulse_noise", strength=(0.3,)),
    "blur": Corruption("gaussian_blur", strength=(3.0,)),
    "contrast": Corruption("contrast"),
    "fog": Corruption("fog", 2),
    "pixelate": Corruption("pixelate", strength=(0.125,)),
}


@dataclass(frozen=True)
class Contender:
    """One row of the demo's table."""

    title: str
    method: str
    statistics: str | None
    protocol: str
    options: dict[str, Any]


# A mirrored digit is another sign, so no view is flipped.
SMALL_STREAM = {"window": 50, "queue": 100, "passes": 2, "flip": False}
# Chosen with another seed: what strong views do to the whole range makes another domain of faint digits.
STRONG_VIEWS = {**SMALL_STREAM, "strong": "own-range"}
CONTENDERS = (
    Contender("TEST", "test", None, "N-O-SF", {}),
    Contender("BN", "bn", None, "N-O-SF", {"window": 50}),
    Contender("TENT", "tent", None, "N-O-SF", {"window": 50}),
    Contender("TTAC (SL)", "ttac", "collected", "N-O-SL", SMALL_STREAM),
    Contender("TTAC++ (SF)", "ttac++", "inferred", "N-O-SF", STRONG_VIEWS),
    Contender("TTAC++ (SL)", "ttac++", "collected", "N-O-SL", STRONG_VIEWS),
    Contender("TTAC++ deep (SL)", "ttac++", "collected", "N-O-SL", {"preset": "deep", **STRONG_VIEWS}),
)


def run_demo(job: DemoJob, console: Console) -> dict[str, dict[str, Record]]:
    """Train or load the source model, run all contenders on all shifts, and write records, table and figure."""
    out, seed = job.out, job.seed
    source, target = load_digits("train", seed), load_digits("test", seed)
    with Progress(
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"), TimeElapsedColumn(),
        console=console,
    ) as progress:  # fmt: skip
        classifier = source_model(*source, seed, job.cache, progress)
        statistics = {
            "collected": SourceStatistics.collect(classifier, [source]),
            "inferred": SourceStatistics.infer(classifier),
        }
        records: dict[str, dict[str, Record]] = {name: {} for name in SHIFTS}
        for contender in CONTENDERS:
            task = progress.add_task(f"{contender.title:12}", total=len(SHIFTS) * len(target[0]), note="")
            stats = statistics[contender.statistics] if contender.statistics else None
            for shift in SHIFTS:
                adapter = adapt(classifier, contender.method, stats=stats, seed=seed, **contender.options)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", PixelsWarning)  # the shift is meant
                    record = evaluate(
                        adapter,
                        shifted(*target, shift, seed),
                        protocol=contender.protocol,
                        progress=lambda outcome, task=task: progress.advance(task, len(outcome.logits)),  # type: ignore[misc]
                        notes={"data": "scikit-learn digits at 32 x 32", "domain": shift},
                    )
                records[shift][contender.title] = record
                record.save(out / "records" / f"{shift}-{contender.title}.json".replace(" ", "-").replace("++", "pp"))
            errors = [records[shift][contender.title].error or 0.0 for shift in SHIFTS]
            progress.update(task, note=f"{sum(errors) / len(errors):5.1f} % error")
    console.print(table(records), soft_wrap=False)
    figure = out / "cumulative_error.png"
    plot_cumulative_error(records, figure)
    console.print(f"figure: {figure}\nrecords: {out / 'records'}")
    return records


def source_model(pixels: Tensor, labels: Tensor, seed: int, cache: Path, progress: Progress) -> Classifier:
    """Train a small residual network on the clean source digits, once."""
    file = cache / f"digits-{EPOCHS}-{seed}.safetensors"
    task = progress.add_task("source model", total=EPOCHS, note="")
    if file.exists():
        progress.update(task, completed=EPOCHS, note="loaded")
        return load_model(str(file)).classifier
    options = {"width": 16, "stem_stride": 2}
    mean, std = (float(pixels.mean()),), (float(pixels.std()),)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        network = new_network("resnet8", SPEC.num_classes, channels=SPEC.channels, options=options)
    train_source(
        Classifier(network, mean=mean, std=std),
        (255 * pixels).round().byte(),
        labels,
        Recipe(EPOCHS, batch=64, flip=False, seed=seed),
        progress=lambda epoch, _, loss: progress.update(task, completed=epoch, note=f"loss {loss:.3f}"),
    )
    description = ModelDescription(
        "resnet8", SPEC.num_classes, SPEC.channels, mean, std, SPEC.size, SPEC.classes, arch_options=options
    )
    save_model(file, network, description)
    return load_model(str(file)).classifier


def shifted(images: Tensor, labels: Tensor, shift: str, seed: int) -> Stream:
    """Stream the target digits under a shift, in small arrival batches."""
    clean = from_tensors((255 * images).round().byte(), labels, SPEC.num_classes)
    corruption = replace(SHIFTS[shift], seed=seed)
    domain = Domain(shift, corruption.of(clean), notes=corruption.notes(min(clean.size)))
    return Stream([domain], Scenario(order="given", batch=ARRIVAL), prefetch=0)  # so that times are the method's own


def table(records: dict[str, dict[str, Record]]) -> Table:
    """Lay the errors out, one row a method, the best of a column in bold."""
    drawn = Table(title="error (%) over the whole stream, each sample predicted once")
    for heading in ("method", "protocol", *records, "mean", "ms a sample"):
        drawn.add_column(heading, justify="left" if heading in ("method", "protocol") else "right")
    rows = []
    for contender in CONTENDERS:
        own = [by_method[contender.title] for by_method in records.values()]
        errors = [record.error or 0.0 for record in own]
        rows.append((contender, [*errors, sum(errors) / len(errors)], own))
    best = [min(column) for column in zip(*(numbers for _, numbers, _ in rows), strict=True)]
    for contender, numbers, own in rows:
        cells = [f"[bold]{n:.1f}[/]" if n == least else f"{n:.1f}" for n, least in zip(numbers, best, strict=True)]
        speed = 1000 * sum(record.seconds for record in own) / sum(record.samples for record in own)
        drawn.add_row(contender.title, contender.protocol, *cells, f"{speed:.1f}")
    return drawn
