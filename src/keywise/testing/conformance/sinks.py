"""What every sink promises, by grade: changes arrive whole, deletions delete, and the store shows what was applied."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from keywise.core.change import Change, Outcome, order_of
from keywise.core.entry import Claim
from keywise.core.sink import SinkResult
from keywise.testing.conformance.promise import Promises, same


@dataclass(slots=True, kw_only=True)
class SinkBench:
    """A fresh, empty store behind a sink."""

    sink: Any
    """A `Sink`, or an `AtomicSink` together with `transaction`."""
    content: Callable[[], Awaitable[Mapping[str, bytes]]]
    """What the store shows: the body of each key that it holds."""
    transaction: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    """For an atomic sink: a transaction of the ledger that shares its database."""
    bad: Change[Any] | None = None
    """A change that this store rejects, if there is one."""
    another: "SinkBench | None" = None
    """The same name in the same store, opened again as another process would; for a sink whose name can move."""
    _tokens: int = field(default=0)

    async def apply(self, *changes: Change[Any]) -> Sequence[SinkResult]:
        """Apply changes under claims like those of a ledger; return one result for each change."""
        results = await self.sink.apply(changes, [self._claim(change) for change in changes])
        same("the number of results", len(results), len(changes))
        return results  # type: ignore[no-any-return]

    async def write(self, *changes: Change[Any]) -> None:
        """Write the changes in one transaction, at most `batch_max` in each call."""
        size = self.sink.batch_max
        async with self.opened() as transaction:
            for start in range(0, len(changes), size):
                await self.sink.write(transaction, changes[start : start + size])

    async def put_in(self, *changes: Change[Any]) -> None:
        """Apply or write the changes, depending on the grade."""
        if self.transaction is not None:
            await self.write(*changes)
        else:
            await self.apply(*changes)

    def opened(self) -> AbstractAsyncContextManager[Any]:
        if self.transaction is None:
            raise TypeError("an atomic sink needs a SinkBench with a transaction")
        return self.transaction()

    def _claim(self, change: Change[Any]) -> Claim:
        self._tokens += 1
        return Claim(change.key, change.order, change.deleted, self._tokens)


MakeSink: TypeAlias = Callable[[], AbstractAsyncContextManager[SinkBench]]

APPLY_PROMISES: Promises[SinkBench] = Promises()
"""Kept by plain and conditional sinks."""
CONDITIONAL_PROMISES: Promises[SinkBench] = Promises()
"""Kept by sinks that refuse a lower version themselves."""
ATOMIC_PROMISES: Promises[SinkBench] = Promises()
"""Kept by sinks that write inside the ledger's transaction."""

READING_PROMISES: Promises[SinkBench] = Promises()
"""Kept by sinks that can be read, of any grade."""

KEYS = ["a", "é", "日本語", "🦉", "'; drop table x; --", 'say "hi"', "line\nbreak", "k" * 512]


def put(key: str, version: int, text: str = "") -> Change[Any]:
    """Return a change whose body is a JSON object with the fields key, version and text."""
    body = msgspec.json.encode({"key": key, "version": version, "text": text})
    return Change(key, order_of(version), body=body)


def gone(key: str, version: int) -> Change[Any]:
    return Change(key, order_of(version), deleted=True, body=msgspec.json.encode({"key": key, "version": version}))


def shown(*changes: Change[Any]) -> dict[str, bytes]:
    return {change.key: change.body for change in changes}


def all_applied(results: Sequence[SinkResult]) -> None:
    same("the outcomes", [result.outcome for result in results], [Outcome.APPLIED] * len(results))


@APPLY_PROMISES.add()
async def what_is_applied_is_shown(bench: SinkBench) -> None:
    """A change that counts as applied can be read from the store, with its whole body."""
    change = put("a", 1, "ünï \\ \" ' \n text")
    all_applied(await bench.apply(change))
    same("the content", dict(await bench.content()), shown(change))


@APPLY_PROMISES.add()
async def any_key_is_applied(bench: SinkBench) -> None:
    """Keys are any text of up to 512 bytes."""
    changes = [put(key, 1) for key in KEYS]
    for change in changes:
        all_applied(await bench.apply(change))
    same("the content", dict(await bench.content()), shown(*changes))


@APPLY_PROMISES.add()
async def a_full_batch_is_applied(bench: SinkBench) -> None:
    """One call takes `batch_max` changes, and returns one result for each, in order."""
    changes = [put(f"k{number}", number + 1) for number in range(bench.sink.batch_max)]
    all_applied(await bench.apply(*changes))
    same("the content", dict(await bench.content()), shown(*changes))


@APPLY_PROMISES.add()
async def newer_state_replaces_older(bench: SinkBench) -> None:
    """A change replaces the whole state of its key, and leaves other keys alone."""
    await bench.apply(put("a", 1, "old"))
    await bench.apply(put("b", 1))
    await bench.apply(put("a", 2, "new"))
    same("the content", dict(await bench.content()), shown(put("a", 2, "new"), put("b", 1)))


@APPLY_PROMISES.add()
async def a_deletion_removes_the_key(bench: SinkBench) -> None:
    """A deleted key is no longer shown; a newer version restores it."""
    await bench.apply(put("a", 1))
    await bench.apply(put("b", 1))
    all_applied(await bench.apply(gone("a", 2)))
    same("the content", dict(await bench.content()), shown(put("b", 1)))
    all_applied(await bench.apply(put("a", 3)))
    same("the content", dict(await bench.content()), shown(put("a", 3), put("b", 1)))


@APPLY_PROMISES.add()
async def a_deletion_of_an_unknown_key_is_applied(bench: SinkBench) -> None:
    """The deletion of a key that the store does not hold counts as applied."""
    all_applied(await bench.apply(gone("a", 2)))
    same("the content", dict(await bench.content()), {})


@APPLY_PROMISES.add()
async def a_repeated_change_counts_as_applied(bench: SinkBench) -> None:
    """A change that is applied again after a lost answer has the same effect."""
    for _ in range(3):
        all_applied(await bench.apply(put("a", 5)))
    same("the content", dict(await bench.content()), shown(put("a", 5)))
    for _ in range(3):
        all_applied(await bench.apply(gone("a", 6)))
    same("the content", dict(await bench.content()), {})


@APPLY_PROMISES.add()
async def a_bad_change_fails_with_a_cause(bench: SinkBench) -> None:
    """A change that the store rejects is a failed result with a cause, and later changes are applied."""
    if bench.bad is not None:
        [result] = await bench.apply(bench.bad)
        same("the outcome", result.outcome, Outcome.FAILED)
        same("whether it has a cause", bool(result.cause), True)
    all_applied(await bench.apply(put("good", 1)))


@CONDITIONAL_PROMISES.add()
async def something_older_is_superseded(bench: SinkBench) -> None:
    """The store itself refuses a version below the one that it holds."""
    await bench.apply(put("a", 5, "new"))
    [result] = await bench.apply(put("a", 4, "old"))
    same("the outcome", result.outcome, Outcome.SUPERSEDED)
    [result] = await bench.apply(gone("a", 3))
    same("the outcome of an older deletion", result.outcome, Outcome.SUPERSEDED)
    same("the content", dict(await bench.content()), shown(put("a", 5, "new")))


@CONDITIONAL_PROMISES.add()
async def a_fresh_deletion_is_not_undone(bench: SinkBench) -> None:
    """The store refuses an older put that comes just after a deletion."""
    await bench.apply(put("a", 5))
    await bench.apply(gone("a", 7))
    [result] = await bench.apply(put("a", 6))
    same("the outcome", result.outcome, Outcome.SUPERSEDED)
    same("the content", dict(await bench.content()), {})


@ATOMIC_PROMISES.add()
async def what_is_written_is_shown_after_the_commit(bench: SinkBench) -> None:
    """The puts and deletions of a transaction are visible once it has committed."""
    await bench.write(put("a", 1, "ünï \\ \" ' \n text"), put("b", 1))
    same("the content", dict(await bench.content()), shown(put("a", 1, "ünï \\ \" ' \n text"), put("b", 1)))
    await bench.write(*(put(key, 2) for key in KEYS))
    await bench.write(gone("a", 3), gone("never seen", 3))
    wanted = shown(put("b", 1), *(put(key, 2) for key in KEYS if key != "a"))
    same("the content", dict(await bench.content()), wanted)


@ATOMIC_PROMISES.add()
async def a_rollback_leaves_the_store_as_it_was(bench: SinkBench) -> None:
    """A transaction that is rolled back leaves nothing in the store."""
    await bench.write(put("a", 1), put("b", 1))
    try:
        async with bench.opened() as transaction:
            await bench.sink.write(transaction, [put("a", 2)])
            await bench.sink.write(transaction, [gone("b", 2)])
            await bench.sink.write(transaction, [put("c", 2)])
            raise _SinkRolledBack
    except _SinkRolledBack:
        pass
    same("the content", dict(await bench.content()), shown(put("a", 1), put("b", 1)))


@ATOMIC_PROMISES.add()
async def a_savepoint_takes_back_its_part_only(bench: SinkBench) -> None:
    """An error inside a savepoint undoes what was written in it; the rest of the transaction stays."""
    async with bench.opened() as transaction:
        await bench.sink.write(transaction, [put("a", 1)])
        try:
            async with transaction.savepoint():
                await bench.sink.write(transaction, [put("b", 1)])
                raise _SinkRolledBack
        except _SinkRolledBack:
            pass
        await bench.sink.write(transaction, [put("c", 1)])
    same("the content", dict(await bench.content()), shown(put("a", 1), put("c", 1)))


@ATOMIC_PROMISES.add()
async def effect_and_mark_are_there_together(bench: SinkBench) -> None:
    """The mark and the effect of one transaction are both committed or both rolled back."""
    for rolls_back in (True, False):
        try:
            async with bench.opened() as transaction:
                same("the refusals", await transaction.decide([put("a", 5)]), {})
                await bench.sink.write(transaction, [put("a", 5)])
                await transaction.mark([put("a", 5)])
                if rolls_back:
                    raise _SinkRolledBack
        except _SinkRolledBack:
            same("the content after a rollback", dict(await bench.content()), {})
    same("the content", dict(await bench.content()), shown(put("a", 5)))
    async with bench.opened() as transaction:
        same("the refusals of the same change", list(await transaction.decide([put("a", 5)])), ["a"])


@ATOMIC_PROMISES.add()
async def a_full_batch_is_written(bench: SinkBench) -> None:
    """One call takes `batch_max` changes."""
    changes = [put(f"k{number}", 1) for number in range(bench.sink.batch_max)]
    async with bench.opened() as transaction:
        await bench.sink.write(transaction, changes)
    same("the content", dict(await bench.content()), shown(*changes))


@ATOMIC_PROMISES.add()
async def a_bad_change_raises_and_its_savepoint_takes_it_back(bench: SinkBench) -> None:
    """A change that the store rejects raises an error; a savepoint keeps it from affecting other changes."""
    if bench.bad is None:
        return
    async with bench.opened() as transaction:
        await bench.sink.write(transaction, [put("a", 1)])
        try:
            async with transaction.savepoint():
                await bench.sink.write(transaction, [bench.bad])
        except Exception as error:
            same("whether the error says why", bool(str(error)), True)
        else:
            raise AssertionError("the bad change was written without an error")
        await bench.sink.write(transaction, [put("b", 1)])
    same("the content", dict(await bench.content()), shown(put("a", 1), put("b", 1)))


class _SinkRolledBack(Exception):
    """Leaves a transaction or a savepoint on purpose."""


@READING_PROMISES.add()
async def what_is_held_can_be_read(bench: SinkBench) -> None:
    """A read returns the body and the version of each key that the store holds, and leaves out the others."""
    changes = [put(key, number + 1, "ünï") for number, key in enumerate(KEYS)]
    await bench.put_in(*changes, put("gone", 1), put("not asked for", 1))
    await bench.put_in(gone("gone", 2))
    found = await bench.sink.read([*KEYS, "gone", "never seen"])
    same("the versions", {key: held.version for key, held in found.items()}, {c.key: c.version for c in changes})
    for change in changes:
        body, wanted = found[change.key].body, msgspec.json.decode(change.body)
        if isinstance(body, bytes):
            same("the body", body, change.body)
        else:
            same("the fields", dict(body), {name: wanted[name] for name in body})
            same("whether there are fields", bool(body), True)


@READING_PROMISES.add()
async def nothing_is_read_for_no_keys(bench: SinkBench) -> None:
    """A read of no keys returns nothing."""
    await bench.put_in(put("a", 1))
    same("what was read", dict(await bench.sink.read([])), {})
