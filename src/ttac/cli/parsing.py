"""The command line of a dataclass: each field is an option that has its name, type, default and help text.

Fields that are dataclasses themselves lend their own fields. The notes of a `setting` say what the type does not:
`option` (another name than the field's, None for no option at all), `positional`, `metavar`, `action` (of argparse,
where values can be repeated), `separator` (where several values are one word), `without` (options of a dataclass
that this command does not have) and `output` (`file` or `folder`, where the path is written to).
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, is_dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from ttac.common.files import check_output
from ttac.common.lookup import suggestion
from ttac.common.options import SettingError, alternatives, checked_fields, read_value

Job = TypeVar("Job")
CONFIG = "config"
EXIT_CODES = (
    "Exit codes: 0: done; 2: a mistake, or a file that cannot be used, told in one line; 130: interrupted (SIGINT), "
    "143: terminated (SIGTERM), and where the last line says so, the same command goes on."
)
METAVARS: dict[Any, str] = {int: "N", float: "X", Path: "PATH", Mapping: "KEY=VALUE"}


class Option(NamedTuple):
    """A field as an option."""

    name: str  # as in a file of --config
    field: Field[Any]
    kind: Any

    @property
    def words(self) -> str:
        """What is typed for it."""
        if self.field.metadata.get("positional"):
            return self.name
        return f"--{'no-' if self.field.default is True else ''}{self.name.replace('_', '-')}"

    @property
    def required(self) -> bool:
        """Whether it has no default."""
        return self.field.default is MISSING and self.field.default_factory is MISSING

    @property
    def several(self) -> bool:
        """Whether it takes several words."""
        origins = {get_origin(kind) for kind in alternatives(self.kind)}
        return bool(origins & {tuple, Mapping}) and "separator" not in self.field.metadata

    @property
    def metavar(self) -> str:
        """What stands for the value in the help text."""
        kinds = [part for kind in alternatives(self.kind) for part in (kind, get_origin(kind), *get_args(kind))]
        choices = "|".join(str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind))
        usual = choices or next((METAVARS[kind] for kind in kinds if kind in METAVARS), "NAME")
        return str(self.field.metadata.get("metavar", usual))

    @property
    def help(self) -> str:
        """The help text, with the default where there is one to tell."""
        text, default = self.field.metadata.get("help", "").replace("%", "%%"), self.field.default
        if self.required:
            return f"{text} (required)"
        if default in (MISSING, None, ()) or isinstance(default, bool):
            return text
        if isinstance(default, tuple):
            default = self.field.metadata.get("separator", " ").join(map(str, default))
        return f"{text} (default: {default})".lstrip()

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        """Let a parser take it; values stay words until all of them are known."""
        notes = self.field.metadata
        if isinstance(self.field.default, bool):
            action = "store_false" if self.field.default else "store_true"
            parser.add_argument(self.words, dest=self.name, action=action, help=self.help)
        elif notes.get("positional"):  # which may be in the file of --config instead
            parser.add_argument(self.name, nargs="*" if self.several else "?", metavar=self.metavar, help=self.help)
        else:
            action = notes.get("action", "extend" if get_origin(self.kind) is Mapping else "store")
            nargs = "+" if self.several and action != "append" else None
            parser.add_argument(
                self.words, dest=self.name, action=action, nargs=nargs, metavar=self.metavar, help=self.help
            )

    def read(self, value: Any) -> Any:
        """Make the field's value of words, or of what a YAML file has."""
        if self.several and isinstance(value, str | int | float):
            value = [value]
        elif "separator" in self.field.metadata and isinstance(value, str):
            value = value.split(self.field.metadata["separator"])
        if get_origin(self.kind) is Mapping and isinstance(value, list):
            return dict(self._pair(str(word)) for word in value)
        return read_value(value, self.kind)

    def _pair(self, word: str) -> tuple[str, str]:
        key, _, value = word.partition("=")
        if not (key and value):
            raise SettingError(self.field.name, f"must be {self.metavar}, not {word!r}")
        return key, value


class Parser(argparse.ArgumentParser):
    """Leaves mistakes to whoever asked."""

    def error(self, message: str) -> Any:
        """Raise what is wrong."""
        raise ValueError(message)


def parse(command: str, kind: type[Job], words: Sequence[str]) -> Job:
    """Fill a dataclass from the words of a command line, over those of the file that `--config` names.

    Raises a ValueError in plain words, which names the option, for every mistake.
    """
    options = {option.name: option for option in options_of(kind)}
    parser = Parser(
        f"ttac {command}",
        description=inspect.getdoc(kind),
        epilog=EXIT_CODES,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for option in options.values():
        option.add_to(parser)
    parser.add_argument("--config", metavar="FILE", help="YAML file of these options; those that are typed win")
    values = _parse_words(parser, words, [option.words for option in options.values()])
    if CONFIG in values:
        values = {**_read_config(Path(values.pop(CONFIG)), list(options)), **values}
    missing = [option.words for option in options.values() if option.required and option.name not in values]
    if missing:
        raise ValueError(f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing")
    try:
        return fill(kind, {name: options[name].read(value) for name, value in values.items()})
    except SettingError as error:
        known = {option.field.name: option.words for option in options.values()}
        raise ValueError(f"{known.get(error.name, error.name)} {error.rule}") from error


def options_of(kind: type) -> Iterator[Option]:
    """Give the options of a dataclass, and of the dataclasses that it holds."""
    for field, hint in checked_fields(kind):
        if is_dataclass(hint):
            without = field.metadata.get("without", ())
            yield from (option for option in options_of(hint) if option.name not in without)  # type: ignore[arg-type]
        elif field.metadata.get("option", field.name) is not None:
            yield Option(field.metadata.get("option", field.name), field, hint)


def check_outputs(job: Any) -> None:
    """Raise an error where a path that a command is to write to cannot be written, before hours of work."""
    if getattr(job, "dry_run", False):
        return
    for field, hint in checked_fields(type(job)):
        value = getattr(job, field.name)
        if is_dataclass(hint):
            check_outputs(value)
        elif "output" in field.metadata and value is not None:
            check_output(value, field.metadata["output"], Option(field.name, field, hint).words)


def fill(kind: type[Job], values: Mapping[str, Any]) -> Job:
    """Make a dataclass, and those that it holds, from values by the names of their options."""
    arguments = {}
    for field, hint in checked_fields(kind):
        name = field.metadata.get("option", field.name)
        if is_dataclass(hint):
            arguments[field.name] = fill(hint, values)  # type: ignore[arg-type]
        elif name in values:
            arguments[field.name] = values[name]
    return kind(**arguments)


def _parse_words(parser: Parser, words: Sequence[str], known: Sequence[str]) -> dict[str, Any]:
    plain = [word.replace("_", "-") if word.startswith("--") and "=" not in word else word for word in words]
    try:
        found, others = parser.parse_known_args(plain)
    except argparse.ArgumentError as error:
        wrong = "takes no value" if "explicit" in error.message else "needs a value"
        raise ValueError(f"{error.argument_name} {wrong}") from error
    for word in others:
        if word.startswith("-"):
            raise ValueError(f"unknown option {word}{suggestion(word, known, most=1)}")
        raise ValueError(f"{word!r} belongs to no option")
    return vars(found)


def _read_config(file: Path, known: Sequence[str]) -> dict[str, Any]:
    import yaml

    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as error:
        raise ValueError(f"{file} is no YAML: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold options and their values, such as batch: 32")
    values = {str(name).replace("-", "_"): value for name, value in content.items()}
    for name in values:
        if name not in known:
            raise ValueError(f"{file}: unknown option {name}{suggestion(name, known, most=1)}")
    return values
