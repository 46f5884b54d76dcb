"""The words that a pipeline is defined with, checked and turned into settings."""

import difflib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import msgspec

from keywise.core.errors import SettingsError
from keywise.core.limits import Debounce, Rate
from keywise.core.settings import Settings, seconds


class Retry(msgspec.Struct, frozen=True):
    """How often a failed change is tried, and how long the waits are."""

    attempts: int = 5
    backoff: float | str = "500ms"
    max: float | str = "1m"


def check_types(key: object, version: object, deleted: object) -> None:
    """People without a type checker get an answer too."""
    if (
        not isinstance(key, str | None)
        or not isinstance(version, str | None)
        or not isinstance(deleted, Mapping | None)
    ):
        raise SettingsError("key= and version= name fields; deleted= maps a field to the values that mean a deletion")


def check_limits(retry: object, debounce: object, rate: object) -> None:
    if not isinstance(retry, Retry | None):
        raise SettingsError(f"retry={retry!r} is no Retry; write retry=Retry(attempts=5)")
    if not isinstance(debounce, Debounce | None):
        raise SettingsError(f'debounce={debounce!r} is no Debounce; write debounce=Debounce("500ms", max_wait="5s")')
    if not isinstance(rate, Rate | None):
        raise SettingsError(f'rate={rate!r} is no Rate; write rate=Rate(1, per="1s")')


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Settings by name; `lease="30s"` and `lease_s=30` mean the same."""
    return Settings(**named_settings(options, {field.name for field in fields(Settings)}))


def named_settings(options: Mapping[str, Any], known: set[str]) -> dict[str, Any]:
    """Options under the names that settings have; an unknown one is refused with the nearest known one."""
    given: dict[str, Any] = {}
    for name, value in options.items():
        if name.endswith("_s") and name.removesuffix("_s") in options:
            raise SettingsError(f"{name.removesuffix('_s')} and {name} are one setting; keep one of them")
        if f"{name}_s" in known:
            given[f"{name}_s"] = None if value is None else seconds(value)
        elif name in known:
            given[name] = value
        else:
            near = difflib.get_close_matches(name, [*known, *(one.removesuffix("_s") for one in known)], 1)
            hint = f"did you mean {near[0]}?" if near else f"known are: {', '.join(sorted(known))}"
            raise SettingsError(f"unknown setting {name!r}; {hint}")
    return given
