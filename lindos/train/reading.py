"""From a recipe, a TOML file and dotted flags to a `Config`; what is misspelt names the nearest."""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from lindos.core.errors import InputError, nearest
from lindos.train import config as sections
from lindos.train.config import Config

# Short flags of the command line and the fields that they stand for.
ALIASES = {
    "--data": "--data.path",
    "--model": "--model.path",
    "--plugin": "--parallel.plugin",
    "--resume": "--train.resume",
}
_EXPONENT = re.compile(r"[0-9]+(\.[0-9]+)?[eE]\+?[0-9]+")


def configure(arguments: Sequence[str], prog: str = "lindos pretrain", more: str = "") -> Config:
    """The configuration that arguments describe: `[CONFIG.toml] [--recipe NAME] [--section.field VALUE ...]`.

    Args:
        arguments: as after the command's name.
        prog: name shown by --help.
        more: text for --help.

    Raises:
        InputError: an unknown or misspelt recipe, key or flag (the nearest is named), or a value of the wrong type.
        SystemExit: --help was printed.
    """
    given = list(arguments)
    recipe, given = taken(given, "--recipe")
    base = Config()
    if recipe is not None:
        from lindos.train.recipes import recipe as named

        base = named(recipe)
    if given and not given[0].startswith("-"):
        base = overlaid(base, _toml(Path(given.pop(0))))
    config = _flags(given, base, prog, more)
    sections.check(config)
    return config


def overlaid(base: Any, table: Mapping[str, Any], where: str = "") -> Any:
    """A copy of a configuration in which the keys of a table replace its fields.

    Raises:
        InputError: an unknown key, which names the nearest, or a value of the wrong type.
    """
    known = {f.name for f in fields(base)}
    hints = get_type_hints(type(base), vars(sections))
    changed: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{where}{key}"
        if key not in known:
            raise InputError(f"unknown key {name!r} in the configuration: {nearest(key, known)}.")
        old = getattr(base, key)
        if is_dataclass(old):
            if not isinstance(value, Mapping):
                raise InputError(f"{name!r} must be a section, got {value!r}. Write its fields below [{name}].")
            changed[key] = overlaid(old, value, f"{name}.")
        else:
            changed[key] = _fitted(name, value, hints[key])
    return replace(base, **changed)


def written(config: Config) -> str:
    """The configuration as TOML that reads back equal; TOML has no word for None, so such fields are left out."""
    tables = [f.name for f in fields(config) if is_dataclass(getattr(config, f.name))]
    lines = [f"{f.name} = {_literal(getattr(config, f.name))}" for f in fields(config) if f.name not in tables]
    for name in tables:
        section = getattr(config, name)
        lines += ["", f"[{name}]"]
        values = ((f.name, getattr(section, f.name)) for f in fields(section))
        lines += [f"{key} = {_literal(value)}" for key, value in values if value is not None]
    return "\n".join(lines) + "\n"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_literal, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def taken(arguments: list[str], flag: str) -> tuple[str | None, list[str]]:
    """The value of a flag, and the arguments without it."""
    rest, value = [], None
    words = iter(arguments)
    for word in words:
        if word == flag:
            value = next(words, None)
            if value is None:
                raise InputError(f"{flag} needs a value, got none.")
        elif word.startswith(flag + "="):
            value = word[len(flag) + 1 :]
        else:
            rest.append(word)
    return value, rest


def _toml(path: Path) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        close = [entry.name for entry in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        hint = f": {nearest(path.name, close)}" if close else ""
        raise InputError(f"the configuration {path} cannot be read, {error.strerror}{hint}.") from error
    except ValueError as error:
        raise InputError(f"the configuration {path} must be TOML, got {error}.") from error


def _flags(arguments: list[str], base: Config, prog: str, more: str) -> Config:
    """tyro reads the flags; its own message becomes ours, so that every mistake looks alike."""
    import tyro

    words = [_spelled(word) for word in arguments]
    shown = io.StringIO()
    description = (
        "Train a language model from text.\n\n"
        f"{prog} [CONFIG.toml] [--recipe NAME] [--nproc N] [--section.field VALUE ...]\n{more}\n"
        "Short: " + ", ".join(f"{short} is {long}" for short, long in ALIASES.items()) + "."
    )
    try:
        with contextlib.redirect_stderr(shown):
            config, left = tyro.cli(
                Config,
                prog=prog,
                description=description,
                args=words,
                default=base,
                use_underscores=True,
                return_unknown_args=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise InputError(_plain(shown.getvalue())) from None
    if left:
        known = [*_known(base), *ALIASES, "--recipe", "--nproc"]
        if not left[0].startswith("-"):
            raise InputError(f"{left[0]!r} belongs to no flag. A configuration file comes first, before all flags.")
        raise InputError(f"unknown flag {left[0]}: {_closest(left[0].partition('=')[0], known)}.")
    return config


def _spelled(word: str) -> str:
    name, equals, value = word.partition("=")
    if name in ALIASES:
        return ALIASES[name] + equals + value
    if _EXPONENT.fullmatch(word) and float(word).is_integer():
        return str(int(float(word)))  # 1e9 is a number of tokens as well as a learning rate
    if name.startswith("--") and _EXPONENT.fullmatch(value) and float(value).is_integer():
        return f"{name}={int(float(value))}"
    return word


def _known(base: Any, where: str = "--") -> list[str]:
    names = []
    for f in fields(base):
        value = getattr(base, f.name)
        names += _known(value, f"{where}{f.name}.") if is_dataclass(value) else [f"{where}{f.name}"]
    return names


def _closest(flag: str, known: list[str]) -> str:
    """The nearest flag, looked for among the fields of the named section first."""
    flag = flag.replace("-", "_").replace("__", "--", 1) if flag.startswith("--") else flag
    section = flag.partition(".")[0] + "."
    same = [name for name in known if name.startswith(section)]
    found = nearest(flag, same or known)
    if same and not found.startswith("did"):
        found = nearest(flag, known)
    return found if same else found.partition(" Known")[0] + ". See --help"


def _plain(box: str) -> str:
    """The text of an error that tyro drew into a box."""
    lines = [line.strip("│╭╰─╮╯ \t") for line in box.splitlines()]
    lines = [line for line in lines if line]
    cut = next((i for i, line in enumerate(lines) if line.startswith(("Argument helptext", "For full helptext"))), None)
    title, *body = lines[:cut] or ["the flags cannot be read"]
    return f"{title.lower()}: {' '.join(body)} See --help."


def _fitted(name: str, value: Any, hint: Any) -> Any:
    """A TOML value as the type of a field."""
    for choice in _choices(hint):
        found, fitted = _as(value, choice)
        if found:
            return fitted
    must = " or ".join(_title(choice) for choice in _choices(hint) if choice is not type(None))
    raise InputError(f"{name!r} must be {must}, got {value!r}.")


def _choices(hint: Any) -> tuple[Any, ...]:
    import types
    import typing

    return get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def _title(hint: Any) -> str:
    import typing

    if get_origin(hint) is typing.Literal:
        return "one of " + ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return "a list of " + ", ".join(getattr(a, "__name__", "any number") for a in get_args(hint))
    return {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}.get(hint, str(hint))


def _as(value: Any, hint: Any) -> tuple[bool, Any]:
    import typing

    if get_origin(hint) is typing.Literal:
        return value in get_args(hint), value
    if get_origin(hint) is tuple:
        kinds = get_args(hint)
        items = [value] if isinstance(value, str) and kinds[-1] is Ellipsis else value
        if not isinstance(items, list | tuple) or (kinds[-1] is not Ellipsis and len(items) != len(kinds)):
            return False, None
        fitted = [_as(item, kinds[0] if kinds[-1] is Ellipsis else kind) for item, kind in _pairs(items, kinds)]
        return all(found for found, _ in fitted), tuple(item for _, item in fitted)
    if hint is bool or isinstance(value, bool):
        return hint is bool and isinstance(value, bool), value
    if hint is int and isinstance(value, float) and value.is_integer():
        return True, int(value)
    if hint is float and isinstance(value, int):
        return True, float(value)
    return isinstance(value, hint), value


def _pairs(items: Sequence[Any], kinds: tuple[Any, ...]) -> list[tuple[Any, Any]]:
    return [(item, kinds[0] if kinds[-1] is Ellipsis else kinds[i]) for i, item in enumerate(items)]
