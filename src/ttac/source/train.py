"""The one loop that trains source classifiers, in steps that can be stopped and gone on from, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ttac.data.labelled import LabelledImages, from_tensors
from ttac.model.classifier import Classifier
from ttac.model.heads import evaluating
from ttac.model.views import random_crop, random_flip, random_operations
from ttac.source.objectives import CrossEntropy, Objective, SourceBatch
from ttac.source.spec import Amp, Recipe

Progress = Callable[[int, int, float], None]  # epoch, epochs, mean training loss


class Trainer:
    """Training at some step: `step` goes on by one batch, and `state_dict` holds all that the next step depends on."""

    def __init__(
        self,
        classifier: Classifier,
        objective: Objective,
        data: LabelledImages,
        recipe: Recipe,
        *,
        precision: torch.dtype | None = None,
    ) -> None:
        kind = None if classifier.branch is None else classifier.branch.kind
        if kind != objective.branch:
            raise ValueError(f"{objective.name} needs the branch {objective.branch}; the classifier has {kind}")
        # The last partial batch of every shuffled epoch is left out.
        self.steps_an_epoch = len(data) // recipe.batch
        if self.steps_an_epoch < 1:
            raise ValueError(f"{len(data)} images do not fill one batch of {recipe.batch}: lower batch")
        self.classifier, self.objective, self.data, self.recipe = classifier.train(), objective, data, recipe
        self.precision = precision
        self.device = classifier.device
        self.steps_done = 0
        self.total_steps = recipe.epochs * self.steps_an_epoch
        self._optimizer = torch.optim.SGD(
            classifier.parameters(), recipe.lr, momentum=0.9, nesterov=True, weight_decay=recipe.weight_decay
        )
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self._optimizer,
            recipe.lr,
            total_steps=self.total_steps,
            pct_start=0.3 if self.total_steps == 5 else 0.2,  # torch divides by zero where the rise is one step long
        )
        # float16 gradients underflow without a scale; bfloat16 has the range of float32.
        self._scaler = torch.amp.GradScaler(self.device.type, enabled=precision == torch.float16)
        self._parts: dict[str, Any] = {
            "classifier": classifier, "optimizer": self._optimizer, "schedule": self._schedule, "scaler": self._scaler
        }  # fmt: skip
        self._generator = torch.Generator().manual_seed(recipe.seed)
        self._order = torch.empty(0, dtype=torch.long)
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        with torch.random.fork_rng(self._cuda_devices()):
            torch.manual_seed(recipe.seed)
            self._randomness = self._global_randomness()

    @property
    def finished(self) -> bool:
        """Whether all epochs are over."""
        return self.steps_done == self.total_steps

    @property
    def epochs_done(self) -> int:
        """The number of whole epochs."""
        return self.steps_done // self.steps_an_epoch

    @property
    def at_epoch_end(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self.steps_done > 0 and self.steps_done % self.steps_an_epoch == 0

    def mean_loss(self) -> float:
        """Average the loss over the steps of this epoch, or raise an error where it is not finite."""
        steps = (self.steps_done - 1) % self.steps_an_epoch + 1
        loss = float(self._loss_sum) / steps
        if not abs(loss) < float("inf"):
            raise ValueError(f"the training loss is not finite after {self.steps_done} steps: lower the learning rate")
        return loss

    def step(self) -> None:
        """Learn from the next batch."""
        recipe = self.recipe
        place = self.steps_done % self.steps_an_epoch
        if place == 0:
            self._order = torch.randperm(len(self.data), generator=self._generator)
            self._loss_sum.zero_()
        rows = self._order[place * recipe.batch : (place + 1) * recipe.batch]
        images = self.data.read(rows).to(self.device).float() / 255
        weak = random_crop(images, self._generator, padding=min(self.data.size) // 8)
        weak = random_flip(weak, self._generator) if recipe.flip else weak
        strong = round(recipe.strong * len(rows))
        if strong:
            weak[:strong] = random_operations(weak[:strong], self._generator)
        batch = SourceBatch(images, weak, self.data.labels[rows].to(self.device), recipe.flip)
        with self._own_randomness(), self.autocast():
            losses = self.objective.losses(self.classifier, batch, self._generator)
        loss = torch.stack([term.float() for term in losses.values()]).sum()
        self._optimizer.zero_grad()
        self._scaler.scale(loss).backward()
        scale = self._scaler.get_scale()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self._scaler.get_scale() >= scale:  # else the gradient overflowed and no step was taken
            self._schedule.step()
        self._loss_sum += loss.detach()
        self.steps_done += 1

    def autocast(self) -> torch.autocast:
        """Compute in the training's precision."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision is not None)

    def state_dict(self) -> dict[str, Any]:
        """Give everything that the next step depends on; plain tensors, numbers and text."""
        return {
            **{name: part.state_dict() for name, part in self._parts.items()},
            "generator": self._generator.get_state(),
            "randomness": self._randomness,
            "order": self._order,
            "loss_sum": self._loss_sum,
            "steps_done": self.steps_done,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict` of the same training."""
        for name, part in self._parts.items():
            part.load_state_dict(state[name])
        self._generator.set_state(state["generator"].cpu())
        self._randomness = [part.cpu() for part in state["randomness"]]
        self._order = state["order"].cpu()
        self._loss_sum.copy_(state["loss_sum"])
        self.steps_done = int(state["steps_done"])

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """Draw what layers such as dropout draw from torch's global generators without touching the caller's."""
        with torch.random.fork_rng(self._cuda_devices()):
            torch.set_rng_state(self._randomness[0])
            for device, state in zip(self._cuda_devices(), self._randomness[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            yield
            self._randomness = self._global_randomness()

    def _global_randomness(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state(device) for device in self._cuda_devices())]

    def _cuda_devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []


def train_source(
    classifier: Classifier,
    images: Tensor,
    labels: Tensor,
    recipe: Recipe,
    objective: Objective | None = None,
    *,
    progress: Progress | None = None,
) -> None:
    """Train `classifier` on uint8 `images [N, C, H, W]` that fit in memory, by cross-entropy unless said otherwise.

    >>> classifier = Classifier(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 2)), mean=0, std=1)
    >>> images, labels = torch.zeros(8, 3, 8, 8, dtype=torch.uint8), torch.zeros(8).long()
    >>> train_source(classifier, images, labels, Recipe(epochs=1, batch=4))
    """
    data = from_tensors(images, labels, classifier.num_classes)
    trainer = Trainer(classifier, objective or CrossEntropy(), data, recipe)
    while not trainer.finished:
        trainer.step()
        if progress is not None and trainer.at_epoch_end:
            progress(trainer.epochs_done, recipe.epochs, trainer.mean_loss())
    classifier.eval()


@torch.no_grad()
def error_rate(classifier: Classifier, data: LabelledImages, batch: int = 512) -> float:
    """Measure the share of wrong predictions, in percent."""
    wrong = 0
    with evaluating(classifier):
        for images, labels in data.batches(batch):
            wrong += int((classifier(images.to(classifier.device)).argmax(1).cpu() != labels).sum())
    return 100 * wrong / len(data)


def choose_precision(amp: Amp, device: torch.device) -> torch.dtype | None:
    """Choose the type of mixed precision, None for float32 alone; "auto" takes one where it pays.

    That is on CUDA, where bfloat16 needs no loss scale and older cards have float16 alone. CPUs without matrix units
    for bfloat16 emulate it: a ResNet-20 step took ten times as long as in float32.

    >>> choose_precision("auto", torch.device("cpu")) is None
    True
    """
    if amp == "auto":
        if device.type != "cuda":
            return None
        # 8.0 is the first generation with bfloat16 units; older ones report support that is emulated.
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return {"off": None, "bf16": torch.bfloat16, "fp16": torch.float16}[amp]
