"""`ttac train`: train a source model into a bundle, with checkpoints from which the same command goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from ttac.common.files import check_space, read_lines, text_hash
from ttac.common.lookup import let_own_networks_be_imported
from ttac.common.resumable import Checkpoints, JobFolder, alone_in, image_progress, signals_noted
from ttac.data.classes import check_every_class_is_there, in_order_of, replace_head
from ttac.data.labelled import LabelledImages
from ttac.data.sets import find_data
from ttac.model.architectures import new_network
from ttac.model.weights import LoadedModel, ModelDescription, check_size, classifier_of, usable_device
from ttac.source.bundle import BRANCH, DESCRIPTION, STATISTICS, WEIGHTS, Bundle, read_description, save_bundle
from ttac.source.spec import ModelSpec, Recipe, TrainJob
from ttac.source.statistics import SourceStatistics
from ttac.source.train import Trainer, choose_precision, error_rate

USUAL_SHARE = 0.1  # kept for validation where the data bring no part of their own


def run_train(job: TrainJob, console: Console) -> None:
    """Do the job, or the rest of it."""
    let_own_networks_be_imported(job.arch)
    initial = None if job.init is None else _initial(job.init, job)
    if initial is not None:
        initial.tell(console)
    train, validation = _read_data(job, initial)
    if initial is not None:
        train, validation = in_order_of(initial.description.classes, train, validation)
    if job.stats:  # which comes last, too late to find out
        check_every_class_is_there(train)
    recipe = dataclasses.replace(job.recipe, flip=job.recipe.flip and train.flip)
    precision = choose_precision(job.amp, usable_device(job.device))
    folder = JobFolder(job.out, _settings(job, recipe, train, validation, initial, precision))
    if folder.is_complete(DESCRIPTION, lambda: read_description(job.out)["training"], console):
        return
    with alone_in(job.out):
        saved = folder.saved((WEIGHTS, BRANCH, STATISTICS), _check_pixels)
        model = _untrained(job, train, initial, None if saved is None else saved["pixels"])
        check_size(model.classifier, train.size)
        # The weights, and a checkpoint with them and their momentum.
        check_space(job.out, 3 * sum(tensor.nbytes for tensor in model.classifier.state_dict().values()))
        trainer = Trainer(model.classifier, job.loss, train, recipe, precision=precision)
        numbers = f"{len(train)} images to train on, {0 if validation is None else len(validation)} to validate"
        kind = "float32" if precision is None else f"mixed precision with {str(precision).removeprefix('torch.')}"
        console.print(
            f"{model.description.arch}: {train.num_classes} classes, {train.size[0]} x {train.size[1]}, {numbers}, "
            f"{job.loss.name}, {kind}",
            markup=False,
        )
        _Worker(job, folder, model, trainer, validation, console).run(saved)


@dataclass
class _Worker:
    """One process's share of a job."""

    job: TrainJob
    folder: JobFolder
    model: LoadedModel
    trainer: Trainer
    validation: LabelledImages | None
    console: Console
    history: list[dict[str, float | None]] = field(default_factory=list)  # by epoch

    def run(self, saved: dict[str, Any] | None) -> None:
        trainer = self.trainer
        if saved is not None:
            try:
                trainer.load_state_dict(saved["trainer"])
                self.history = [dict(epoch) for epoch in saved["history"]]
            except Exception as error:  # a damaged or forged file fails wherever it likes
                raise self.folder.damaged(error) from error
            self.console.print(f"going on after {trainer.steps_done} of {trainer.total_steps} steps", markup=False)
        self._walk()
        self._finish()

    def _walk(self) -> None:
        trainer = self.trainer
        with signals_noted(self.console) as noted, image_progress(self.console, "{task.fields[note]}") as progress:
            checkpoints = Checkpoints(self.job.checkpoint_every, noted, self._checkpoint)
            task = progress.add_task("training", total=trainer.total_steps, note="")
            while not trainer.finished:
                trainer.step()
                if trainer.at_epoch_end:
                    self._end_epoch()
                note = f"epoch {trainer.epochs_done + (not trainer.at_epoch_end)}, loss {trainer.mean_loss():.3f}"
                progress.update(task, completed=trainer.steps_done, note=note)
                checkpoints.after_step(f"{trainer.steps_done} of {trainer.total_steps} steps", trainer.finished)

    def _end_epoch(self) -> None:
        loss = self.trainer.mean_loss()
        error = None if self.validation is None else error_rate(self.trainer.classifier, self.validation)
        self.history.append({"loss": loss, "validation_error": error})
        said = "" if error is None else f", validation error {error:.2f} %"
        place = f"epoch {self.trainer.epochs_done}/{self.trainer.recipe.epochs}"
        self.console.print(f"{place}: training loss {loss:.4f}{said}", markup=False)

    def _checkpoint(self) -> None:
        description = self.model.description
        pixels = {"mean": list(description.mean or ()), "std": list(description.std or ())}
        self.folder.save(pixels=pixels, history=self.history, trainer=self.trainer.state_dict())

    def _finish(self) -> None:
        classifier, job = self.trainer.classifier.eval(), self.job
        statistics = None
        if job.stats:
            self.console.print("collecting source statistics", markup=False)
            statistics = SourceStatistics.collect(classifier, self.trainer.data.batches(self.trainer.recipe.batch))
        error = self.history[-1]["validation_error"]
        training = {"settings": self.folder.settings, "validation_error": error, "epochs": self.history}
        save_bundle(job.out, Bundle(classifier, self.model.description, job.loss, statistics, training))
        self.folder.finish()
        known = "unknown" if error is None else f"{error:.2f} %"
        self.console.print(f"{job.out}: {classifier.fingerprint()}, validation error {known}", markup=False)


def _initial(name: str, job: TrainJob) -> LoadedModel:
    """Load the model to start from; a bundle's own mean and std are replaced later."""
    given = (None, None) if (Path(name) / DESCRIPTION).is_file() else (job.mean, job.std)
    return ModelSpec(name, job.arch, mean=given[0], std=given[1]).load()


def _read_data(job: TrainJob, initial: LoadedModel | None) -> tuple[LabelledImages, LabelledImages | None]:
    known = ModelDescription("", 1) if initial is None else initial.description
    size = known.size if job.size is None else (job.size, job.size)
    source = find_data(job.data)
    read: dict[str, Any] = {"channels": known.channels, "crop_pct": known.crop_pct}
    classes = None if job.classes is None else read_lines(job.classes)
    data = source.read("train", size=size, classes=classes, **read).in_memory()
    if job.size is not None and data.size != size:
        raise ValueError(f"{job.data} is of {data.size[0]} x {data.size[1]}: --size is for image files alone")
    if classes is not None and len(classes) != data.num_classes:
        raise ValueError(f"there are {len(classes)} class names for {data.num_classes} classes")
    if job.val == 0:
        return data, None
    if job.val_data is not None:
        source = find_data(job.val_data)
    elif job.val is not None or "test" not in source.splits:
        return data.split(job.val or USUAL_SHARE, job.recipe.seed)
    part = "test" if "test" in source.splits else "train"
    held = source.read(part, size=data.size, classes=data.classes, **read).in_memory()
    if (held.size, held.channels) != (data.size, data.channels) or held.num_classes > data.num_classes:
        raise ValueError(f"validation images are {held.kind}, training images {data.kind}")
    return data, held


def _untrained(
    job: TrainJob, data: LabelledImages, initial: LoadedModel | None, pixels: Mapping[str, list[float]] | None
) -> LoadedModel:
    """Make the classifier as it is before the first step; `pixels` are the mean and std of a checkpoint."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.recipe.seed)
        if initial is None:
            assert job.arch is not None
            network = new_network(job.arch, data.num_classes, channels=data.channels, options=job.arch_options)
            description = ModelDescription(job.arch, data.num_classes, data.channels, arch_options=job.arch_options)
        else:
            network, description = initial.classifier.model, initial.description
            if initial.classifier.num_classes != data.num_classes:
                replace_head(initial, data.num_classes)
        mean, std = job.mean or description.mean, job.std or description.std
        if pixels is not None:
            mean, std = tuple(pixels["mean"]), tuple(pixels["std"])
        elif mean is None or std is None:
            of_data = data.pixel_moments()
            mean, std = mean or of_data[0], std or of_data[1]
        description = dataclasses.replace(
            description, num_classes=data.num_classes, classes=data.classes, size=data.size, mean=mean, std=std
        )
        model = classifier_of(network, description, device=job.device)
        branch = None if initial is None else initial.classifier.branch
        if branch is None or branch.kind != job.loss.branch:
            branch = job.loss.new_branch(model.classifier.feature_dim)
        model.classifier.branch = None if branch is None else branch.to(job.device)
    if model.classifier.channels != data.channels:
        raise ValueError(f"the model takes {model.classifier.channels} channels, the images have {data.channels}")
    return dataclasses.replace(model, classifier=model.classifier.tuned(channels_last=job.channels_last))


def _settings(
    job: TrainJob,
    recipe: Recipe,
    train: LabelledImages,
    validation: LabelledImages | None,
    initial: LoadedModel | None,
    precision: torch.dtype | None,
) -> dict[str, Any]:
    """Name all that the bundle depends on, as plain JSON."""
    return {
        "data": train.fingerprint,
        "images": len(train),
        "validation": None if validation is None else [validation.fingerprint, len(validation)],
        "classes": None if train.classes is None else text_hash([ascii(name) for name in train.classes]),
        "size": train.size,
        "arch": job.arch or (initial.description.arch if initial is not None else None),
        "arch_options": dict(job.arch_options),
        "init": None if initial is None else initial.classifier.fingerprint(),
        "mean": job.mean,
        "std": job.std,
        "objective": job.loss.as_dict(),
        **dataclasses.asdict(recipe),
        "strong": recipe.strong or None,  # which is what trainings of before there was a share have
        "precision": str(precision or torch.float32),
        "channels_last": job.channels_last or None,
        "statistics": job.stats,
        "device": job.device,
    }


def _check_pixels(saved: dict[str, Any]) -> None:
    ModelDescription("", 1, mean=tuple(saved["pixels"]["mean"]), std=tuple(saved["pixels"]["std"]))
