"""Objects whose records are changes with keys and versions of their own: the newest of each key wins."""

import itertools
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import keywise
from ingest.object_rig import ObjectRig, sqlite_rig
from keywise.core import events
from keywise.core.controls import Pause
from running import awaited

ENVELOPE = {"kind": "envelope", "key": "id", "version": "v", "deleted": {"gone": [True]}}


def changes(*records: tuple[str, int] | tuple[str, int, bool]) -> bytes:
    """Records by key and version; a third value deletes the key."""
    return b"".join(
        json.dumps({"id": key, "v": version, "gone": bool(rest)}).encode() + b"\n" for key, version, *rest in records
    )


def envelope_rig(folder: Path, **options: Any) -> ObjectRig:
    return sqlite_rig(folder, **{"sink": f"sqlite:///{folder}/ledger.db?table=stock", **ENVELOPE, **options})


def stock(folder: Path) -> dict[str, int]:
    with closing(sqlite3.connect(folder / "ledger.db")) as connection:
        return dict(connection.execute("select key, version from stock").fetchall())


OBJECTS = {
    "first": changes(("a", 1), ("b", 1), ("c", 1), ("a", 2)),
    "second": changes(("b", 3), ("a", 5), ("c", 2, True)),
    "third": changes(("c", 3), ("b", 2), ("d", 1), ("a", 4, True)),
}


@pytest.mark.parametrize("order", list(itertools.permutations(OBJECTS)), ids="-".join)
@awaited
async def test_the_newest_change_of_a_key_wins_whatever_the_order_of_its_objects(tmp_path: Path, order: list[str]):
    """An object that is read again, or deleted, changes nothing."""
    rig = envelope_rig(tmp_path, part_records=2)
    for version, name in enumerate(order):
        await rig.put(name, OBJECTS[name], version + 1)
        if version != 1:
            await rig.work_until_empty()
    expected = {"a": 5, "b": 3, "c": 3, "d": 1}
    assert stock(tmp_path) == expected
    await rig.put("first", OBJECTS["first"], version=10)
    rig.place.delete("second")
    await rig.send(rig.place.delete_message("second", 11))
    await rig.work_until_empty()
    assert stock(tmp_path) == expected
    assert await rig.letters() == [] and await rig.letters("logs/records") == []


@awaited
async def test_a_poisoned_record_is_a_dead_letter_and_its_object_is_committed(tmp_path: Path):
    """One record has no key, and the handler refuses another one for ever."""
    rig = envelope_rig(tmp_path, sink="", part_records=2, attempts_max=2)
    applied: list[str] = []

    @rig.logs.apply
    def write(change: keywise.Change[dict[str, Any]]) -> None:
        if change.key == "poison":
            raise ValueError("it is poisoned")
        applied.append(change.key)

    content = changes(("a", 1), ("poison", 1), ("b", 1)) + b'{"v": 1}\n' + changes(("c", 1))
    await rig.put("o", content)
    await rig.work_until_empty()
    assert sorted(applied) == ["a", "b", "c"]
    letters = await rig.letters("logs/records")
    assert [letter.key for letter in letters] == ["", "poison"]
    assert all((letter.headers or {})["keywise-object"] == rig.place.uri("o") for letter in letters)
    entry = await rig.entry("o")
    assert entry is not None and entry.mark is not None and entry.position is None
    assert await rig.letters() == []


@pytest.mark.parametrize("part_records", [2, 10])
@awaited
async def test_an_object_with_a_paused_key_waits_without_an_attempt_and_others_go_on(tmp_path: Path, part_records: int):
    """An object of one part shares calls with the others."""
    rig = envelope_rig(tmp_path, part_records=part_records)
    async with rig.opened("logs/records") as pipeline:
        await pipeline.control_store.pause(Pause("b", False, 0.0, ""))
    await rig.put("held", changes(("a", 1), ("b", 1), ("c", 1), ("d", 1)))
    for number in range(5):
        await rig.put(f"free{number}", changes((f"f{number}", 1)))
    others = {f"f{number}": 1 for number in range(5)}

    async def are_others_committed() -> bool:
        entries = [await rig.entry(f"free{number}") for number in range(5)]
        return all(entry is not None and entry.mark is not None for entry in entries)

    await rig.work_until(are_others_committed)
    entry = await rig.entry("held")
    assert entry is None or (entry.mark, entry.attempts) == (None, 0)
    assert "b" not in stock(tmp_path) and stock(tmp_path).items() >= others.items()
    async with rig.opened("logs/records") as pipeline:
        assert await pipeline.control_store.resume("b", False)
    await rig.work_until_empty()
    assert stock(tmp_path) == others | {"a": 1, "b": 1, "c": 1, "d": 1}
    assert rig.emitted(events.Failed) == []
    assert await rig.letters() == [] and await rig.letters("logs/records") == []
