"""The indexes that an alias can stand for: creates, prepares, counts and drops them, and moves the alias atomically.

An index that may go live has a guard, the alias `NAME-epoch-N`, where N is the number of swaps so far. The request that
moves the name to the index requires the guard and removes it, so the engine refuses a late copy of the request as a
whole. The index that the name leaves gets the guard of the next epoch, for a rollback.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn, TypeVar
from urllib.parse import quote

import msgspec

from keywise.adapters.http.client import HttpResponse
from keywise.adapters.opensearch.definition import (
    BuildNote,
    IndexState,
    definition_like,
    definition_of,
    digest_of,
    noted,
)
from keywise.adapters.opensearch.documents import NOT_FOUND, is_index_name, own_reason
from keywise.adapters.opensearch.engine import Engine
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.target import TargetNote

T = TypeVar("T")

TIMEOUT = "timeout=10s"
"""How long the engine waits until all nodes know of a change; its default would be as long as the client waits."""
HEALTH_S = 20
"""How long `finish` waits for replicas."""
HEALTH_MARGIN_S = 10.0
"""How much longer than the engine the client waits for the answer."""
EXISTS = "resource_already_exists_exception"
ALIAS_MISSING = frozenset({"aliases_not_found_exception", "resource_not_found_exception", "illegal_argument_exception"})
"""The errors of engines for an alias that must exist and does not; the last one, if it was removed a moment before."""
DROPPED = "dropped"
"""Replaces the epoch in the guard of an index that is being dropped."""


class IndexTargets:
    """The index that a name stands for, and the others that it may stand for or has stood for."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine = engine
        self._name = name
        self._guards = re.compile(rf"{re.escape(name)}-epoch-(?:\d+|{DROPPED})")

    # The name.

    async def current(self) -> str:
        """Return the index that the name stands for; raise `AdminError` if the name cannot move."""
        indexes = await self._alias_by_index()
        if len(indexes) != 1:
            raise AdminError(f"{self._state_of_alias(indexes)}; let it stand for one")
        return next(iter(indexes))

    async def move(self, before: str, after: str, epoch: int) -> None:
        """Let the name stand for `after`; return once that is certain."""
        for target in (before, after):
            self._check_name(target)
        indexes = await self._alias_by_index()
        if list(indexes) == [after]:
            return
        if list(indexes) != [before]:
            self._refuse_move(before, after, self._state_of_alias(indexes))
        guard = self._guard(epoch)
        answer = await self._change_aliases(
            {"remove": {"index": after, "alias": guard, "must_exist": True}},
            {"remove": {"index": before, "alias": self._name, "must_exist": True}},
            {"add": {"index": after, "alias": self._name, **indexes[before]}},
            {"add": {"index": before, "alias": self._guard(epoch + 1)}},
        )
        if answer.status == 200:
            return self._check_acknowledged(answer)
        if _type_of(answer) in ALIAS_MISSING and list(await self._alias_by_index()) == [after]:
            return  # Another process, or an earlier copy of the call, has moved it meanwhile.
        if _type_of(answer) in (NOT_FOUND, *ALIAS_MISSING):
            self._refuse_move(before, after, f"{self._engine.cause(answer)}; {after} needs the alias {guard}")
        self._check_accepted(answer, f"{self._name} was not moved to {after}")

    def _state_of_alias(self, indexes: Iterable[str]) -> str:
        return f"{self._name} stands for {' and '.join(sorted(indexes)) or 'no index'}"

    def _refuse_move(self, before: str, after: str, cause: str) -> NoReturn:
        raise AdminError(f"{self._name} was not moved from {before} to {after}: {cause}")

    async def _alias_by_index(self) -> dict[str, dict[str, Any]]:
        """Return the indexes of the alias, with its properties; raise `AdminError` if the name is an index itself."""
        answer = await self._ask("GET", f"/{quote(self._name, safe='')}/_alias")
        if _type_of(answer) == NOT_FOUND:
            return {}
        self._engine.check(answer)
        found = self._read(answer)
        if self._name in found:
            raise AdminError(
                f"{self._name} is an index, and only an alias can move; to put an alias in its place, while writes "
                f"wait: PUT /{self._name}/_block/write, then "
                f'POST /{self._name}/_clone/{self._name}-0 {{"settings": {{"index.blocks.write": null}}}}, then '
                f'POST /_aliases {{"actions": [{{"remove_index": {{"index": "{self._name}"}}}}, '
                f'{{"add": {{"index": "{self._name}-0", "alias": "{self._name}"}}}}]}}'
            )
        return {index: state.aliases[self._name] for index, state in found.items() if self._name in state.aliases}

    # Building.

    async def create(self, target: str, note: TargetNote, epoch: int, definition: bytes | None) -> None:
        """Create an index that takes writes fast, or find the one that the same run has created."""
        self._check_name(target)
        live = await self.current()
        chosen = definition_of(definition) if definition is not None else None
        build = BuildNote(note.pipeline, note.generation, digest=digest_of(chosen) if chosen is not None else "")
        index = await self._found(target)
        if index is None:
            await self._check_guards_work(live)
            wanted = chosen if chosen is not None else definition_like(await self._existing(live))
            body = {**noted(wanted, build), "aliases": {self._guard(epoch): {}}}
            answer = await self._ask("PUT", f"{_path(target)}?{TIMEOUT}", body)
            # Another worker of the same run may have been faster.
            if _type_of(answer) != EXISTS:
                self._check_accepted(answer, f"{target} was not created")
                self._check_acknowledged(answer)
            await self._check_templates(target)
            index = await self._existing(target)
        self._check_is_of(index, target, build, self._guard(epoch))
        await self._prepare(target, index)

    async def _check_guards_work(self, live: str) -> None:
        """Raise `AdminError` if the engine cannot refuse a late copy of a move, before the swap would notice."""
        missing = {"index": live, "alias": f"{self._name}-epoch-none", "must_exist": True}
        answer = await self._change_aliases({"remove": missing})
        if _type_of(answer) in ALIAS_MISSING:
            return
        if answer.status == 200:
            self._check_acknowledged(answer)
        elif answer.status != 400:
            self._engine.check(answer)
        raise AdminError(
            f"{self._engine.name} does not know must_exist, without which a late request could move an alias back; "
            f"use OpenSearch 2.12 or Elasticsearch 7.11, or later: {self._engine.cause(answer)}"
        )

    async def _check_templates(self, target: str) -> None:
        """Delete a new index that a template has given the name, and raise `AdminError`.

        The engine refuses writes to the name as long as it stands for two indexes.
        """
        indexes = await self._alias_by_index()
        if target in indexes and len(indexes) > 1:
            await self._change_aliases({"remove": {"index": target, "alias": self._name, "must_exist": True}})
            await self._ask("DELETE", _path(target))
            raise AdminError(
                f"a template gives the index {target} the alias {self._name}, so that it would be live at once; remove "
                f"the alias from the template; {target} is deleted again"
            )

    def _check_is_of(self, index: IndexState, target: str, build: BuildNote, guard: str) -> None:
        """Raise `AdminError` unless an index was built by this run with the same definition, and can go live."""
        if self._name in index.aliases:
            raise AdminError(f"{self._name} stands for {target}, which is live; choose another name")
        other = f"choose another name, or delete it with DELETE {_path(target)}"
        if index.note is None:
            raise AdminError(f"there is an index {target} already, which no run has built; {other}")
        if index.note.run != build.run:
            built = f"reindex {index.note.generation} of {index.note.pipeline}"
            raise AdminError(f"there is an index {target} already, which {built} has built; {other}")
        if index.note.digest != build.digest:
            raise AdminError(
                f"this run has created {target} with another definition; start it again with the first "
                "definition, or cancel the run and drop its target"
            )
        if guard not in index.aliases:
            raise AdminError(f"{target} has lost its alias {guard}, and cannot go live; {other}")

    async def _prepare(self, target: str, index: IndexState) -> None:
        """Note in the index which settings to restore, also those from a template, and set those for fast writes."""
        note = index.note
        assert note is not None, "checked by the caller"
        if note.restore is None:
            meta = index.meta_with(msgspec.structs.replace(note, restore=index.current_settings()))
            await self._change(target, "_mapping", {"_meta": meta})
            await self._change(target, "_settings", index.build_settings())

    async def finish(self, target: str) -> list[str]:
        """Restore settings, make all writes visible, wait for replicas, and return why the index cannot serve yet."""
        index = await self._existing(target)
        if index.note is not None and index.note.restore:
            await self._change(target, "_settings", index.note.restore)
            meta = index.meta_with(msgspec.structs.replace(index.note, restore={}))
            await self._change(target, "_mapping", {"_meta": meta})
            index = await self._existing(target)
        reasons = [*await self._refresh(target), *await self._missing_copies(target, index)]
        if not index.aliases.keys() & {self._name, *self._guards_of(index)}:
            reasons.append(f"{target} has lost its alias {self._name}-epoch-N, and cannot go live; build another one")
        return reasons

    async def _refresh(self, target: str) -> list[str]:
        answer = await self._ask("POST", _path(target, "_refresh"))
        self._check_accepted(answer, f"{target} was not refreshed")
        shards = self._decoded(answer, _Shards)
        return [f"{shards.failures} shards of {target} could not be refreshed"] if shards.failures else []

    async def _missing_copies(self, target: str, index: IndexState) -> list[str]:
        """Wait a while for as many copies of each shard as the nodes can hold; return what is still missing."""
        health = await self._health(target)
        copies = 1 + min(index.number("number_of_replicas"), max(0, health.number_of_data_nodes - 1))
        wanted = copies * index.number("number_of_shards")
        if health.active_shards < wanted:
            health = await self._health(target, f"?wait_for_active_shards={wanted}&timeout={HEALTH_S}s")
        if health.active_shards >= wanted:
            return []
        return [
            f"{target} is {health.status}: {health.active_shards} of {wanted} copies of its shards are active, on "
            f"{health.number_of_data_nodes} data nodes; GET /_cluster/allocation/explain says why"
        ]

    async def _health(self, target: str, query: str = "") -> "_Health":
        timeout_s = HEALTH_S + HEALTH_MARGIN_S
        answer = await self._ask("GET", f"/_cluster/health/{quote(target, safe='')}{query}", timeout_s=timeout_s)
        if answer.status != 408:  # The wait timed out; the answer still has the health.
            self._check_accepted(answer, f"the health of {target} is unknown")
        return self._decoded(answer, _Health)

    # Counting, listing and dropping.

    async def count(self, target: str) -> int:
        await self._existing(target)
        if reasons := await self._refresh(target):
            raise UnavailableError(reasons[0])
        answer = await self._ask("GET", _path(target, "_count"))
        self._check_accepted(answer, f"{target} was not counted")
        counted = self._decoded(answer, _Count)
        if counted.shards.failed:
            raise UnavailableError(f"{counted.shards.failed} shards of {target} could not be counted")
        return counted.count

    async def built_by(self, pipeline: str) -> list[str]:
        """Return the indexes that runs of a pipeline have built for this name, the oldest first."""
        names = f"{quote(self._name, safe='')},{quote(self._name, safe='')}-epoch-*"
        fields = "*.aliases,*.mappings._meta,*.settings.index.creation_date"
        answer = await self._ask("GET", f"/{names}?ignore_unavailable=true&filter_path={fields}")
        self._engine.check(answer)
        found = []
        for target, index in self._read(answer).items():
            is_ours = self._name in index.aliases or self._guards_of(index)
            if is_ours and index.note is not None and index.note.pipeline == pipeline:
                created = int(index.settings.get("index", {}).get("creation_date", 0))
                found.append((index.note.generation, created, target))
        return [target for _, _, target in sorted(found)]

    async def drop(self, target: str) -> None:
        """Delete an index; a missing one is no error.

        Raises `AdminError` if it is live, or if no run has built it and the name has never left it.
        """
        self._check_name(target)
        index = await self._found(target)
        if index is None:
            return
        guards = self._guards_of(index)
        if self._name in index.aliases:
            raise AdminError(f"{self._name} stands for {target}, which is live; nothing was deleted")
        if not guards and index.note is None:
            raise AdminError(
                f"{target} was not built by a run, and {self._name} has never left it; nothing was deleted; to delete "
                f"it all the same, send DELETE {_path(target)}"
            )
        # Without a guard it cannot go live, neither now nor before a delayed copy of the deletion arrives.
        dropped = f"{self._name}-epoch-{DROPPED}"
        if guards != [dropped]:
            removed = [{"remove": {"index": target, "alias": one, "must_exist": True}} for one in guards]
            answer = await self._change_aliases(*removed, {"add": {"index": target, "alias": dropped}})
            self._check_accepted(answer, f"{target} was not deleted, because its aliases have changed")
            self._check_acknowledged(answer)
        answer = await self._ask("DELETE", f"{_path(target)}?{TIMEOUT}")
        if _type_of(answer) != NOT_FOUND:
            self._check_accepted(answer, f"{target} was not deleted")
            self._check_acknowledged(answer)

    # Requests.

    async def _found(self, target: str) -> IndexState | None:
        """Return an index; None if there is none."""
        answer = await self._ask("GET", f"{_path(target)}?flat_settings=true")
        if _type_of(answer) == NOT_FOUND:
            return None
        self._engine.check(answer)
        indexes = self._read(answer)
        if target not in indexes:
            raise AdminError(f"{target} is an alias of {' and '.join(sorted(indexes))}; name an index")
        return indexes[target]

    async def _existing(self, target: str) -> IndexState:
        self._check_name(target)
        index = await self._found(target)
        if index is None:
            raise AdminError(f"{self._engine.name} has no index {target}")
        return index

    async def _change(self, target: str, what: str, body: Mapping[str, Any]) -> None:
        answer = await self._ask("PUT", f"{_path(target, what)}?{TIMEOUT}", body)
        self._check_accepted(answer, f"the {what[1:]} of {target} could not be changed")
        self._check_acknowledged(answer)

    async def _change_aliases(self, *actions: Mapping[str, Any]) -> HttpResponse:
        """Carry out all of these actions, or none of them."""
        return await self._ask("POST", f"/_aliases?{TIMEOUT}", {"actions": actions})

    async def _ask(self, method: str, path: str, body: object = None, timeout_s: float | None = None) -> HttpResponse:
        """Send a request that can be repeated: after a lost answer, the state says whether it has arrived."""
        with self._engine.repeatable():
            encoded = b"" if body is None else msgspec.json.encode(body)
            return await self._engine.ask(method, path, encoded, timeout_s=timeout_s)

    def _check_accepted(self, answer: HttpResponse, otherwise: str) -> None:
        """Raise `AdminError` if the engine refuses the request as such, and for other failures what the sink raises."""
        if answer.status in (400, 404, 409, 500) and _type_of(answer):
            raise AdminError(f"{otherwise}: {self._engine.cause(answer)}")
        self._engine.check(answer)

    def _check_acknowledged(self, answer: HttpResponse) -> None:
        if not self._decoded(answer, _Acknowledged).acknowledged:
            raise UnavailableError(f"{self._engine.name}: not all nodes have acknowledged the change in time")

    def _read(self, answer: HttpResponse) -> dict[str, IndexState]:
        return self._decoded(answer, dict[str, IndexState])

    def _decoded(self, answer: HttpResponse, kind: type[T]) -> T:
        with self._engine.repeatable():
            return msgspec.json.decode(answer.body, type=kind)

    def _check_name(self, target: str) -> None:
        if not is_index_name(target):
            raise AdminError(f"{target!r} cannot be the name of an index; use lowercase letters, digits, - and _")

    def _guard(self, epoch: int) -> str:
        return f"{self._name}-epoch-{epoch}"

    def _guards_of(self, index: IndexState) -> Sequence[str]:
        return [alias for alias in index.aliases if self._guards.fullmatch(alias)]


class _Acknowledged(msgspec.Struct, frozen=True):
    acknowledged: bool


class _ShardCount(msgspec.Struct, frozen=True):
    failed: int = 0


class _Shards(msgspec.Struct, frozen=True):
    shards: _ShardCount = msgspec.field(name="_shards", default=_ShardCount())

    @property
    def failures(self) -> int:
        return self.shards.failed


class _Count(msgspec.Struct, frozen=True):
    count: int
    shards: _ShardCount = msgspec.field(name="_shards", default=_ShardCount())


class _Health(msgspec.Struct, frozen=True):
    status: str
    active_shards: int
    number_of_data_nodes: int


def _path(target: str, what: str = "") -> str:
    return f"/{quote(target, safe='')}{f'/{what}' if what else ''}"


def _type_of(answer: HttpResponse) -> str:
    """Return the type of the engine's own reason for a refusal; empty if it has none."""
    reason = own_reason(answer)
    return reason.type if reason is not None else ""
