"""Reads a configuration from flags, `PD_*` environment variables and a TOML file.

A field has one name in all three: `lease_s` is `--lease-s 5`, `PD_LEASE_S=5` and `lease_s = 5`. A
flag goes before the environment, the environment before the file, the file before the default.
"""

from __future__ import annotations

import difflib
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pd_grpc.protocol.config import DecodeConfig, PrefillConfig, RouterConfig, ServerConfig

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Config = TypeVar("Config", bound=BaseModel)

CONFIG_FLAG = "--config"
CONFIG_ENV = "PD_CONFIG"
ENV_PREFIX = "PD_"
HELP_COLUMNS = 100

# One environment and one TOML file serve processes of several roles, so a variable or key that
# belongs to another role is no error; nor are the name of the TOML file and where the client
# commands find the router. Any other unknown PD_* variable or key is one.
ROLES: Mapping[str, type[ServerConfig]] = {
    "prefill": PrefillConfig,
    "decode": DecodeConfig,
    "router": RouterConfig,
}
OTHER_ENV = frozenset({CONFIG_ENV, "PD_ENDPOINT"})


class SettingsError(ValueError):
    """A setting that cannot be used. The message names the field, the limit and the source."""


class SettingRow(NamedTuple):
    """One line of the reference table of settings."""

    flag: str
    env: str
    default: str
    description: str


@dataclass(frozen=True)
class _Setting:
    """A value as written, and where: `--lease-s`, `PD_LEASE_S` or `lease_s in pd.toml`."""

    value: Any
    source: str


def flag_of(field: str) -> str:
    """The flag of a field: `lease_s` is `--lease-s`."""
    return "--" + field.replace("_", "-")


def env_of(field: str) -> str:
    """The environment variable of a field: `lease_s` is `PD_LEASE_S`."""
    return ENV_PREFIX + field.upper()


def load_settings(
    cls: type[Config],
    argv: Sequence[str],
    environ: Mapping[str, str],
    toml: Path | None = None,
) -> Config:
    """Builds a `cls` from `argv` (without the program's name), `environ` and a TOML file.

    The file is `--config`, else `PD_CONFIG`, else `toml`. `--help` and `-h` print the settings and
    exit with status 0, whatever else is there.

    Raises `SettingsError` for an unknown flag, key or `PD_*` variable, a value out of its bounds
    and a file that cannot be read.
    """
    if is_help(argv):
        print(settings_help(cls))
        raise SystemExit(0)
    flags, config = _read_flags(cls, argv)
    if config is not None:
        table = _read_toml(cls, Path(config), CONFIG_FLAG)
    elif environ.get(CONFIG_ENV):
        table = _read_toml(cls, Path(environ[CONFIG_ENV]), CONFIG_ENV)
    elif toml is not None:
        table = _read_toml(cls, toml, "the caller")
    else:
        table = {}
    settings = {**table, **_read_env(cls, environ), **flags}
    try:
        return cls.model_validate({name: s.value for name, s in settings.items()})
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, cls, settings))) from None


def is_help(argv: Sequence[str]) -> bool:
    """Whether the settings themselves are asked for."""
    return not {"--help", "-h"}.isdisjoint(argv)


def settings_table(cls: type[BaseModel]) -> list[SettingRow]:
    """The settings of `cls` in the order of its fields, for the help text and the docs."""
    return [
        SettingRow(flag_of(name), env_of(name), _default(field), field.description or "")
        for name, field in cls.model_fields.items()
    ]


def settings_help(cls: type[BaseModel]) -> str:
    """The text of `--help`: every field with its flag, variable, default, meaning and, where they
    are few, choices; no line is longer than 100 columns."""
    head = SettingRow("flag", "environment", "default", "meaning")
    config = SettingRow(CONFIG_FLAG, CONFIG_ENV, "", "TOML file; its keys are the fields' names")
    rows = [head, config, *settings_table(cls)]
    choices = ["", "", *map(_choices, cls.model_fields.values())]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    indent = sum(widths) + 2 * len(widths)
    lines = []
    for row, chosen_from in zip(rows, choices, strict=True):
        first, *others = textwrap.wrap(
            row.description + chosen_from, HELP_COLUMNS - indent, break_on_hyphens=False
        )
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        lines += ["  ".join([*cells, first]), *(" " * indent + line for line in others)]
    return "\n".join(lines)


def _choices(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not Literal:
        return ""
    return f" ({', '.join(get_args(field.annotation))})"


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return str(value)


def _is_tuple(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _read_flags(
    cls: type[BaseModel], argv: Sequence[str]
) -> tuple[dict[str, _Setting], str | None]:
    """The fields among the flags, and the value of `--config`."""
    fields = {flag_of(name): name for name in cls.model_fields}
    found: dict[str, _Setting] = {}
    config: str | None = None
    for flag, value in _flag_pairs(cls, fields, argv):
        if flag == CONFIG_FLAG:
            config = value
            continue
        name = fields[flag]
        if not _is_tuple(cls.model_fields[name]):
            found[name] = _Setting(value, flag)
            continue
        before = found[name].value if name in found else ()
        found[name] = _Setting((*before, *_split(value)), flag)
    return found, config


def _flag_pairs(
    cls: type[BaseModel], fields: Mapping[str, str], argv: Sequence[str]
) -> Iterator[tuple[str, str]]:
    """Each flag with its value; `--no-x` and a bare `--x` of a boolean get theirs here."""
    switches = {flag for flag, name in fields.items() if cls.model_fields[name].annotation is bool}
    words = iter(argv)
    for word in words:
        flag, equals, value = word.partition("=")
        positive = "--" + flag[len("--no-") :]
        if not equals and flag in switches:
            yield flag, "true"
        elif not equals and flag.startswith("--no-") and positive in switches:
            yield positive, "false"
        elif not flag.startswith("-"):
            raise SettingsError(f"unexpected argument {word}")
        elif flag not in fields and flag != CONFIG_FLAG:
            raise SettingsError(f"unknown flag {flag}{_did_you_mean(flag, [*fields, CONFIG_FLAG])}")
        elif equals:
            yield flag, value
        else:
            following = next(words, None)
            # A value may be negative, so that its bound can be named, but is never a flag.
            if following is None or following.startswith("--"):
                raise SettingsError(f"{flag} needs a value")
            yield flag, following


def _read_env(cls: type[BaseModel], environ: Mapping[str, str]) -> dict[str, _Setting]:
    fields = {env_of(name): name for name in cls.model_fields}
    others = OTHER_ENV.union(env_of(name) for role in ROLES.values() for name in role.model_fields)
    found: dict[str, _Setting] = {}
    for variable in sorted(v for v in environ if v.startswith(ENV_PREFIX)):
        if variable in fields:
            value, name = environ[variable], fields[variable]
            many = _is_tuple(cls.model_fields[name])
            found[name] = _Setting(_split(value) if many else value, variable)
        elif variable not in others:
            guess = _did_you_mean(variable, [*fields, *others])
            raise SettingsError(f"unknown environment variable {variable}{guess}")
    return found


def _split(value: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in value.split(",") if part.strip())


def _read_toml(cls: type[BaseModel], path: Path, named_by: str) -> dict[str, _Setting]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}, named by {named_by}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path} is not UTF-8: {error.reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{path} is not TOML: {error}") from None
    known = {*cls.model_fields, *(name for role in ROLES.values() for name in role.model_fields)}
    for key in table:
        if key not in known:
            raise SettingsError(f"unknown key {key} in {path}{_did_you_mean(key, known)}")
    return {
        key: _Setting(value, f"{key} in {path}")
        for key, value in table.items()
        if key in cls.model_fields
    }


def _did_you_mean(word: str, among: Iterable[str]) -> str:
    close = difflib.get_close_matches(word, sorted(among), n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def _explain(
    error: ValidationError, cls: type[BaseModel], settings: Mapping[str, _Setting]
) -> Iterator[str]:
    """One line for each wrong field, such as
    `lease_s must be greater than 0, not '-1' (from --lease-s)`."""
    for detail in error.errors(include_url=False, include_context=False):
        name = str(detail["loc"][0]) if detail["loc"] else cls.__name__
        source = f" (from {settings[name].source})" if name in settings else ""
        says = detail["msg"].removeprefix("Value error, ")
        if says.startswith("Input should be "):
            says = f"must be {says.removeprefix('Input should be ')}, not {detail['input']!r}"
        yield f"{name} {says}{source}"
