"""A comparison for people: a table for the terminal, and one page that needs nothing but itself."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from PIL import Image
from rich import box
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ttac import __version__
from ttac.data.folder import UnreadableImageError
from ttac.evaluation.comparison import ADAPTED, BN, FROZEN, Change

NONE = "-"
MOST_CLASSES = 20  # rows of the table of classes
SIDE = 160  # pixels of a thumbnail
EXACT = 64  # pixels up to which an image is kept as it is
WIDEST = 16  # characters of a column in the terminal
ADVICE = {
    False: "None of these numbers needs labels, and none is an error. A bad sign is that few classes are in use, fewer "
    "than you expect in the images. Confidence is no proof: a model that takes all images for one class is sure too.",
    True: "The error is by the labels that were given. All other numbers need none.",
}
Name = Callable[[int], str]


def class_namer(classes: Sequence[str] | None) -> Name:
    """Name classes by their names, or by their numbers where they have none."""
    return str if classes is None else classes.__getitem__


def rows(summary: Mapping[str, Any], name: Name) -> list[tuple[str, list[str]]]:
    """Put the numbers of all models into words, one row a measure; measures that no model has are left out."""
    models = summary["models"]

    def row(title: str, text: Callable[[Mapping[str, Any]], str | None]) -> tuple[str, list[str]]:
        return title, [text(model) or NONE for model in models.values()]

    def number(key: str, pattern: str) -> Callable[[Mapping[str, Any]], str | None]:
        return lambda model: None if model.get(key) is None else pattern.format(model[key])

    def differing(other: str) -> Callable[[Mapping[str, Any]], str | None]:
        return lambda model: f"{model['differs_from'][other]:.1%}" if other in model["differs_from"] else None

    def usual(model: Mapping[str, Any]) -> str:
        most = max(model["counts"])
        return f"{name(model['counts'].index(most))} {most / sum(model['counts']):.0%}"

    found = [
        row("error", number("error", "{:.2f} %")),
        row("differs from frozen", differing(FROZEN)),
        row("differs from BN", differing(BN)),
        row("mean confidence", number("confidence", "{:.3f}")),
        row("mean entropy, nats", number("entropy", "{:.3f}")),
        row(f"classes in use, of {len(models[ADAPTED]['counts'])}", number("classes_in_use", "{:.1f}")),
        row("most predicted", usual),
        row("distance to anchors", number("anchor_distance", "{:.2f}")),
        row("ms an image", lambda model: f"{1000 * model['seconds_an_image']:.3g}"),
    ]
    return [(title, cells) for title, cells in found if any(cell != NONE for cell in cells)]


def titles(summary: Mapping[str, Any], method: str) -> list[str]:
    """Name the columns."""
    return [{FROZEN: "frozen", BN: "BN", ADAPTED: method}[model] for model in summary["models"]]


def terminal_table(summary: Mapping[str, Any], method: str, name: Name) -> Table:
    """Make the table for a terminal of 80 columns."""
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("")
    for title in titles(summary, method):
        table.add_column(Text(title), justify="right", max_width=WIDEST, overflow="fold")
    for title, cells in rows(summary, name):
        table.add_row(title, *map(Text, cells))
    return table


def render_page(
    summary: Mapping[str, Any],
    changes: Sequence[Change],
    *,
    method: str,
    facts: Mapping[str, str],
    name: Name,
    read: Callable[[str], Tensor],
) -> str:
    """Render the page; `read` gives the pixels `[C, H, W]` of an image file."""
    template = Template((files("ttac.evaluation") / "comparison.html").read_text(encoding="utf-8"))
    columns = titles(summary, method)
    numbers = [(escape(title), [escape(cell) for cell in cells]) for title, cells in rows(summary, name)]
    shown = "\n".join(_figure(change, name, read) for change in changes)
    differing = summary["models"][ADAPTED]["differs_from"][FROZEN] * summary["images"]
    return template.substitute(
        method=escape(method),
        facts="\n".join(f"<div><dt>{escape(key)}</dt><dd>{escape(text)}</dd></div>" for key, text in facts.items()),
        advice=ADVICE[summary["models"][ADAPTED]["error"] is not None],
        numbers=_table(["", *columns], numbers),
        classes=_table(["class", *columns], _class_rows(summary, name)),
        classes_note=_classes_note(summary),
        changed=f"{differing:,.0f} of {summary['images']:,}",
        changes=f'<div class="images">{shown}</div>' if changes else "<p>No prediction differs.</p>",
        version=escape(__version__),
    )


def _table(head: Sequence[str], body: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Lay a table out; the cells of the body are HTML already."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    lines = (
        f'<tr><th scope="row">{title}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>' for title, cells in body
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _class_rows(summary: Mapping[str, Any], name: Name) -> list[tuple[str, list[str]]]:
    counts = [model["counts"] for model in summary["models"].values()]
    order = sorted(range(len(counts[0])), key=lambda number: -max(each[number] for each in counts))
    return [
        (escape(name(number)), [_share(each[number], summary["images"]) for each in counts])
        for number in order[:MOST_CLASSES]
    ]


def _share(count: int, images: int) -> str:
    share = 100 * count / images
    return f'<span class="bar" style="--share:{share:.1f}%">{count:,}</span>'


def _classes_note(summary: Mapping[str, Any]) -> str:
    more = len(summary["models"][ADAPTED]["counts"]) - MOST_CLASSES
    return f"The {MOST_CLASSES} most frequent ones; {more:,} more are left out." if more > 0 else ""


def _figure(change: Change, name: Name, read: Callable[[str], Tensor]) -> str:
    truth = "" if change.truth is None else f"<div>labelled {escape(name(change.truth))}</div>"
    return (
        f"<figure>{_picture(read, change.file)}<figcaption>"
        f"<div><b>{escape(name(change.after))}</b> {change.confidence:.0%}</div>"
        f"<div>was {escape(name(change.before))} {change.before_confidence:.0%}</div>"
        f"{truth}<div class='file'>{escape(change.file)}</div></figcaption></figure>"
    )


def _picture(read: Callable[[str], Tensor], file: str) -> str:
    """Show an image as the model sees it."""
    try:
        pixels = read(file)
    except UnreadableImageError:
        return '<div class="gone">cannot be read any more</div>'
    levels = (255 * pixels).round().byte().movedim(0, -1).numpy()
    image = Image.fromarray(levels[..., 0] if levels.shape[-1] == 1 else levels)
    kind = "png" if max(image.size) <= EXACT else "jpeg"
    image.thumbnail((SIDE, SIDE))
    content = io.BytesIO()
    image.save(content, kind)
    return f'<img alt="" src="data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}">'
