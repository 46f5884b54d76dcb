"""The definition of an index: its mapping and settings, and the note in its mapping of the run that builds it."""

import hashlib
from collections.abc import Mapping
from typing import Any

import msgspec

from keywise.core.errors import AdminError
from keywise.core.target import TargetNote

META = "keywise"
"""The field of a mapping's `_meta` that holds the note."""
BUILD_SETTINGS = {"index.refresh_interval": "-1", "index.number_of_replicas": 0}
"""Settings of an index while it is built: no search reads it yet, and the engine copies replicas once, at the end."""
AUTO_EXPAND, NEVER = "index.auto_expand_replicas", "false"
"""The setting by which the engine changes the number of replicas by itself, and its value for never."""
OWN_SETTINGS = (
    "index.blocks.",
    "index.creation_date",
    "index.history.",
    "index.provided_name",
    "index.resize.",
    "index.routing.allocation.initial_recovery.",
    "index.shrink.",
    "index.uuid",
    "index.verified_before_close",
    "index.version.",
)
"""The prefixes of settings that the engine sets by itself, or that block an index. It refuses most of them for a new
index."""


class BuildNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an index remembers of the run that builds it."""

    pipeline: str
    generation: int
    restore: dict[str, Any] | None = None
    """Settings to restore after the build, empty after that; None if the index has not been prepared for it yet."""
    digest: str = ""
    """The result of `digest_of` for the operator's definition; empty if the index is like the live one."""

    @property
    def run(self) -> TargetNote:
        return TargetNote(self.pipeline, self.generation)


class IndexState(msgspec.Struct, frozen=True):
    """An index as the engine describes it, with flat settings."""

    aliases: dict[str, dict[str, Any]] = {}
    mappings: dict[str, Any] = {}
    settings: dict[str, Any] = {}

    @property
    def meta(self) -> dict[str, Any]:
        """The `_meta` of the mapping."""
        meta = self.mappings.get("_meta")
        return meta if isinstance(meta, dict) else {}

    @property
    def note(self) -> BuildNote | None:
        """The note of the run that has built the index; None if no run has."""
        try:
            return msgspec.convert(self.meta.get(META), BuildNote)
        except msgspec.ValidationError:
            return None

    def meta_with(self, note: BuildNote) -> dict[str, Any]:
        """Return the `_meta` with another note; a mapping's `_meta` is only replaced as a whole."""
        return self.meta | {META: msgspec.to_builtins(note)}

    def number(self, setting: str) -> int:
        """Return a setting that is a whole number; 0 if the index does not have it."""
        return int(self.settings.get(f"index.{setting}") or 0)

    def build_settings(self) -> dict[str, Any]:
        """Return the settings that make the build fast."""
        is_expanding = str(self.settings.get(AUTO_EXPAND, NEVER)) != NEVER
        return BUILD_SETTINGS | ({AUTO_EXPAND: NEVER} if is_expanding else {})

    def current_settings(self) -> dict[str, Any]:
        """Return the current values of the settings that the build changes; None is the engine's default."""
        return {name: self.settings.get(name) for name in self.build_settings()}


def definition_of(body: bytes) -> dict[str, Any]:
    """Return the mapping and settings in an operator's file; raises `AdminError` if it cannot be a definition."""
    try:
        definition = msgspec.json.decode(body, type=dict[str, Any])
        parts = {name: msgspec.convert(definition.pop(name, {}), dict[str, Any]) for name in ("mappings", "settings")}
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        example = '{"mappings": {}, "settings": {}}'
        raise AdminError(f"the definition must be a JSON object such as {example}: {error}") from error
    if definition:
        raise AdminError(
            f"the definition has {', '.join(sorted(definition))} besides mappings and settings; leave it out, because "
            "the swap gives the index its alias"
        )
    return parts


def definition_like(index: IndexState) -> dict[str, Any]:
    """Return the mapping and settings of an index, for another one like it."""
    settings = {
        name: value for name, value in index.settings.items() if not name.startswith(OWN_SETTINGS) and value is not None
    }
    return {"mappings": index.mappings, "settings": settings}


def digest_of(definition: Mapping[str, Any]) -> str:
    """Return a digest that depends on neither the order of the fields nor the white space of the file."""
    return hashlib.sha256(msgspec.json.encode(definition, order="sorted")).hexdigest()


def noted(definition: Mapping[str, Any], note: BuildNote) -> dict[str, Any]:
    """Return a definition with the note of a run in its mapping."""
    state = IndexState(mappings=definition["mappings"])
    meta = state.meta_with(note)
    return {**definition, "mappings": state.mappings | {"_meta": meta}}
