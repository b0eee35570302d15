"""Curves of a run for those who watch it: one small interface, and three tools behind it that are imported when used.

>>> class Printed:
...     def on_update(self, step, scalars):
...         print(step, scalars)
...     def close(self):
...         print("done")
>>> import torch, ttac
>>> network = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(12, 2))
>>> clf = ttac.Classifier(network, mean=[0.0] * 3, std=[1.0] * 3)
>>> stream = [(torch.rand(4, 3, 2, 2), torch.zeros(4, dtype=torch.long))]
>>> _ = ttac.evaluate(ttac.adapt(clf, "test"), stream, "N-O-SF", callbacks=[Printed()])  # doctest: +ELLIPSIS
4 {'error': ...}
done
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ttac.common.files import writing
from ttac.common.options import SettingError, setting

if TYPE_CHECKING:
    from ttac.evaluation.engine import Outcome


class Callback(Protocol):
    """What `evaluate` tells of a run while it runs."""

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take what is known after an arrival: `step` counts the images so far, of all passes.

        `scalars` are the `error` so far in percent, where there are labels, and where the model was updated also
        `loss/...`, `measure/...` and `seconds_per_update`.
        """

    def close(self) -> None:
        """End: nothing more comes."""


def scalars_of(outcome: Outcome) -> dict[str, float]:
    """Give what one arrival batch led to as numbers by name, none where there is nothing to tell."""
    found = {} if outcome.error is None else {"error": outcome.error}
    found |= {f"loss/{name}": value for name, value in outcome.losses.items()}
    found |= {f"measure/{name}": value for name, value in outcome.measures.items()}
    if outcome.update_seconds:
        found["seconds_per_update"] = sum(outcome.update_seconds) / len(outcome.update_seconds)
    return found


class Callbacks:
    """Several callbacks as one, which are closed however the block ends."""

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks

    def tell(self, step: int, outcome: Outcome) -> None:
        """Pass on what an arrival led to."""
        if self._callbacks and (scalars := scalars_of(outcome)):
            for callback in self._callbacks:
                callback.on_update(step, scalars)

    def __enter__(self) -> Callbacks:
        return self

    def __exit__(self, *_: object) -> None:
        for callback in self._callbacks:
            callback.close()


class TensorBoard:
    """Writes event files into a folder, which `tensorboard --logdir` shows."""

    def __init__(self, folder: Path | str, name: str = "") -> None:
        self._folder = Path(folder) / name
        with writing(self._folder):
            self._writer = _library("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(self._folder))

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Write each number."""
        with writing(self._folder):
            for name, value in scalars.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is left."""
        with writing(self._folder):
            self._writer.close()


class WandB:
    """Sends to a project of Weights & Biases, as the library is set up on this machine."""

    def __init__(self, project: str, name: str = "") -> None:
        self._run = _library("wandb", "wandb").init(project=project, name=name or None)

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


class MLflow:
    """Sends to an experiment of MLflow, wherever its tracking is set up to go."""

    def __init__(self, experiment: str, name: str = "") -> None:
        self._mlflow = _library("mlflow", "mlflow")
        self._mlflow.set_experiment(experiment)
        self._mlflow.start_run(run_name=name or None, nested=True)

    def on_update(self, step: int, scalars: Mapping[str, float]) -> None:
        """Send the numbers."""
        self._mlflow.log_metrics(dict(scalars), step=step)

    def close(self) -> None:
        """End the run."""
        self._mlflow.end_run()


LOGGERS: dict[str, Callable[[str, str], Callback]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
WHERE = "tensorboard:FOLDER, wandb:PROJECT or mlflow:EXPERIMENT"


def log_setting() -> Any:
    """Make the field that names where runs can be watched."""
    return setting((), f"watch it in {WHERE}; can be repeated", action="append", metavar="TOOL:PLACE")


def check_log(words: Sequence[str]) -> None:
    """Refuse what `open_loggers` does not know."""
    for word in words:
        kind, _, place = word.partition(":")
        if kind not in LOGGERS or not place:
            raise SettingError("log", f"must be {WHERE}, not {word!r}")


def open_loggers(words: Sequence[str], name: str = "") -> list[Callback]:
    """Open what `--log` names, each for a run of that name."""
    return [LOGGERS[kind](place, name) for kind, _, place in (word.partition(":") for word in words)]


def _library(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"the logger needs {package}: pip install {package} ({error})") from error
