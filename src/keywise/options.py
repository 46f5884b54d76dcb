"""The words that a pipeline is defined with, checked and turned into settings."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any, TypedDict

import msgspec

from keywise.core.errors import SettingsError
from keywise.core.limits import Debounce, Rate
from keywise.core.settings import Settings, named_settings, seconds
from keywise.core.url import Address
from keywise.ingest.definition import ObjectsDefinition, check_kind, root_of
from keywise.ingest.formats import Format, format_of
from keywise.ingest.notification import ObjectSelection
from keywise.ingest.object_run import GONE_S
from keywise.ingest.parts import PartSettings
from keywise.ingest.reader import ReadPlan


class Retry(msgspec.Struct, frozen=True):
    """How often a failed change is tried, and how long the waits are."""

    attempts: int = 5
    backoff: float | str = "500ms"
    max: float | str = "1m"


Duration = float | str
"""Seconds as a number, or text such as `500ms`, `5s`, `10m`, `2h`, `7d`."""


class PipelineOptions(TypedDict, total=False):
    """The settings that `App.pipeline` accepts by name; `Settings` says what each of them means."""

    batch_max: int
    prefetch: int
    evict_delay: Duration
    evict_delay_max: Duration
    concurrency: int
    lease: Duration
    margin: Duration
    runtime_max: Duration
    redelivery: Duration
    retention: Duration | None
    horizon: Duration
    attempts_max: int
    crashes_max: int
    backoff: Duration
    backoff_max: Duration
    poll: Duration
    drain: Duration
    repair: Duration
    body_max_bytes: int
    history: str
    history_age: Duration
    history_lines_max: int
    maintenance: Duration
    on_ledger_down: str
    ledger_grace: Duration
    journal: str | None
    journal_keys_max: int


class ObjectOptions(PipelineOptions, total=False):
    """What `App.objects` accepts by name; `PartSettings` says what the settings of parts mean."""

    format: str | Format | Callable[[bytes], Iterable[Any]]
    kind: str
    compression: str
    prefix: str
    suffix: str
    gone: Duration
    part_bytes: int
    part_records: int
    record_max: int
    object_max: int
    bad_share_max: float
    bad_records_min: int


OBJECT_WORDS = ("format", "kind", "compression", "prefix", "suffix", "gone")
"""What `App.objects` accepts besides settings."""
PIPELINE_WORDS = ("key", "version", "deleted", "read", "retry", "debounce", "rate")
"""What `App.pipeline` accepts besides settings."""


def check_types(key: object, version: object, deleted: object) -> None:
    """People without a type checker get an answer too."""
    are_fields = isinstance(key, str | None) and isinstance(version, str | None)
    if not are_fields or not isinstance(deleted, Mapping | None):
        raise SettingsError("key= and version= name fields; deleted= maps a field to the values that mean a deletion")


def check_limits(retry: object, debounce: object, rate: object) -> None:
    if not isinstance(retry, Retry | None):
        raise SettingsError(f"retry={retry!r} is no Retry; write retry=Retry(attempts=5)")
    if not isinstance(debounce, Debounce | None):
        raise SettingsError(f'debounce={debounce!r} is no Debounce; write debounce=Debounce("500ms", max_wait="5s")')
    if not isinstance(rate, Rate | None):
        raise SettingsError(f'rate={rate!r} is no Rate; write rate=Rate(1, per="1s")')


def with_retry(options: Mapping[str, Any], retry: Retry | None) -> Mapping[str, Any]:
    """Return the options with those of a retry, unless they are given by their own names."""
    if retry is None:
        return options
    return {"attempts_max": retry.attempts, "backoff": retry.backoff, "backoff_max": retry.max, **options}


def settings_from(options: Mapping[str, Any]) -> Settings:
    """Make settings from options; `lease="30s"` and `lease=30` mean the same."""
    return Settings(**named_settings(options, [field.name for field in fields(Settings)], PIPELINE_WORDS))


def objects_from(store: Address, options: Mapping[str, Any], retry: Retry | None) -> tuple[ObjectsDefinition, Settings]:
    """Make the definition of an object pipeline and its settings from options."""
    words = {word: options[word] for word in OBJECT_WORDS if word in options}
    cuts = {field.name: options[field.name] for field in fields(PartSettings) if field.name in options}
    if "format" not in words:
        raise SettingsError('format= is missing; write for example format="ndjson"')
    check_kind(words.get("kind", "state"))
    prefix, suffix = words.get("prefix", ""), words.get("suffix", "")
    if not isinstance(prefix, str) or not isinstance(suffix, str):
        raise SettingsError("prefix= and suffix= are texts with which the names of objects begin and end")
    plan = ReadPlan(format_of(words["format"]), PartSettings(**cuts), compression=words.get("compression", "auto"))
    rest = {name: value for name, value in with_retry(options, retry).items() if name not in {*words, *cuts}}
    known = [field.name for field in fields(Settings)]
    settings = Settings(**named_settings(rest, known, ObjectOptions.__annotations__))
    selection = ObjectSelection(root_of(store), prefix, suffix)
    return ObjectsDefinition(store.url, selection, plan, _gone_s(words.get("gone", GONE_S))), settings


def _gone_s(given: Duration) -> float:
    gone_s = seconds(given)
    if not 0 < gone_s < float("inf"):
        raise SettingsError(f"gone={given!r} must be above zero, and finite: a store may show an object late")
    return gone_s
