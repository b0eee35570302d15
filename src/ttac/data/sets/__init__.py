"""One way to all data: a data set by its name, or whatever a path holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from ttac.common.files import user_cache
from ttac.common.lookup import suggestion
from ttac.data.corruptions.constants import SEVERITIES
from ttac.data.labelled import LabelledImages, from_tensors
from ttac.data.sets import arrays, cifar, image_files
from ttac.data.sets.digits import load_digits
from ttac.data.sets.glyphs import draw_glyphs
from ttac.data.sets.layout import Layout, Wanted
from ttac.data.sets.spec import DatasetSpec
from ttac.data.sets.specs import SPECS, get_spec


def data_root(root: Path | None = None) -> Path:
    """Give the folder where data sets are looked for by name: `root`, else $TTAC_DATA, else the user's cache."""
    if root is not None:
        return root.expanduser()
    return Path(os.environ["TTAC_DATA"]).expanduser() if os.environ.get("TTAC_DATA") else user_cache() / "data"


@dataclass(frozen=True)
class DataSet:
    """A data set that was found, of which nothing is read yet."""

    path: Path
    layout: Layout
    spec: DatasetSpec | None

    @property
    def splits(self) -> tuple[str, ...]:
        """The parts that are kept apart, of train and test; none where all is one part."""
        return self.layout.splits(self.path)

    def read(
        self,
        split: str | None = None,
        *,
        domain: str | None = None,
        severity: int | None = None,
        size: tuple[int, int] | None = None,
        channels: int = 3,
        crop_pct: float | None = None,
        classes: Sequence[str] | None = None,
    ) -> LabelledImages:
        """Read images and labels of a part.

        `split` is train or test, and may be left out where there is one alone; a folder that is one part is read whole,
        whatever split is asked for. `domain` is a corruption, a version or a folder beside train, where the data have
        such. `size` (height, width), `channels` and `crop_pct` are for image files, which are made so; the data set's
        own are the default. `classes` name the classes in the order of their labels.
        """
        spec, layout, name = self.spec, self.layout, str(self.path) if self.spec is None else self.spec.name
        if self.splits and split not in self.splits:
            if split is not None or len(self.splits) > 1:
                hint = f"; it is a shift of {spec.source}" if spec is not None and spec.source else ""
                wrong = f"no {split} images" if split is not None else "several parts"
                raise ValueError(f"{name} has {wrong}: choose {' or '.join(self.splits)}{hint}")
            split = self.splits[0]
        if domain is not None and not layout.domains:
            raise ValueError(f"{name} has no domains: leave {domain!r} out")
        if layout.severities:
            if domain is None:
                raise ValueError(f"{name} is corrupted already: name one of its domains, such as fog, and a severity")
            if severity not in SEVERITIES:
                raise ValueError(f"{name} has the severities {', '.join(map(str, SEVERITIES))}: choose one")
        elif severity is not None:
            raise ValueError(f"{name} has no severities: leave {severity} out")
        if classes is not None and spec is not None and len(classes) != spec.num_classes:
            raise ValueError(f"there are {len(classes)} class names for {spec.num_classes} classes")
        if crop_pct is None:
            crop_pct = 1.0 if spec is None else spec.crop_pct
        names = None if classes is None else tuple(classes)
        return layout.read(self.path, Wanted(spec, split, domain, severity, size, channels, crop_pct, names))


def find_data(data: str, root: Path | None = None) -> DataSet:
    """Find what `data` names: a data set below `data_root(root)`, `NAME=PATH` for one elsewhere, or a path.

    >>> len(find_data("digits").read("test"))
    1000
    """
    name, _, place = data.partition("=")
    if name in _EMBEDDED and place:
        raise ValueError(f"{name} comes with {_EMBEDDED[name].expects} and has no path: leave ={place} out")
    if name in SPECS and place:
        return _recognise(Path(place).expanduser(), SPECS[name])  # which shells leave to us after a "="
    if data in SPECS:
        return _below(data_root(root), SPECS[data])
    path = Path(data).expanduser()
    if not path.exists():
        near = suggestion(name, SPECS)
        raise FileNotFoundError(f"no folder {path}, and no data set of that name{near} (ttac data list)")
    return _recognise(path, None)


def _read_embedded(_: Path, wanted: Wanted, load: Callable[[str], tuple[Tensor, Tensor]]) -> LabelledImages:
    assert wanted.spec is not None
    images, labels = load(wanted.split or "")
    # A mirrored digit is another sign.
    data = from_tensors((255 * images).round().byte(), labels, wanted.spec.num_classes, flip=False)
    return replace(data, classes=wanted.classes or wanted.spec.classes)


_EMBEDDED = {
    name: Layout(
        "embedded",
        package,
        lambda path, spec: None,
        lambda path: ("train", "test"),
        partial(_read_embedded, load=load),
        holds=name,
    )
    for name, package, load in (("digits", "scikit-learn", load_digits), ("glyphs", "matplotlib", draw_glyphs))
}
_LAYOUTS = (*cifar.LAYOUTS, *arrays.LAYOUTS, *image_files.LAYOUTS)  # from the most to the least particular


def _fitting(spec: DatasetSpec | None) -> list[Layout]:
    """Give the layouts that a data set may have."""
    return [one for one in _LAYOUTS if spec is None or (one.kind == spec.layout and one.holds in (None, spec.name))]


def _matches(path: Path, spec: DatasetSpec | None) -> list[DataSet]:
    found = []
    for layout in _fitting(spec):
        place = layout.find(path, spec)
        if place is not None:
            found.append(DataSet(place, layout, spec or (get_spec(layout.holds) if layout.holds else None)))
    return found


def _below(root: Path, spec: DatasetSpec) -> DataSet:
    """Look for a data set by its name and by its usual folders."""
    if spec.name in _EMBEDDED:
        return DataSet(Path(_EMBEDDED[spec.name].expects), _EMBEDDED[spec.name], spec)
    places = [root / name for name in (spec.name, *spec.folders) if (root / name).exists()]
    found = next((one for place in places for one in _matches(place, spec)), None)
    if found is not None:
        return found
    here = f" (for the folder {spec.name} of here, write ./{spec.name})" if Path(spec.name).exists() else ""
    fetch = f"`ttac data fetch {spec.name}` gets it, or {spec.name}=PATH says where it is"
    steps = fetch if spec.files else spec.manual_steps(root / spec.name)
    raise FileNotFoundError(f"{spec.name} is not in {root}{here}: {steps}")


def _recognise(path: Path, spec: DatasetSpec | None) -> DataSet:
    if not path.exists():
        raise FileNotFoundError(f"no folder {path}")
    found = _matches(path, spec)
    if not found:
        expected = "; or ".join(layout.expects for layout in _fitting(spec))
        raise ValueError(f"{path} does not hold {'a data set' if spec is None else spec.name}: expected {expected}")
    kinds = {one.layout.holds: one for one in found if one.layout.kind == "cifar" and one.layout.holds is not None}
    if len(kinds) > 1:
        either = " or ".join(f"{name}={path}" for name in kinds)
        raise ValueError(f"{path} holds {' and '.join(kinds)}: write {either}")
    return found[0]
