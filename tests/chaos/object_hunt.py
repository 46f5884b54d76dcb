"""Kills the workers of an object pipeline at random moments, and judges what its sink holds of each object."""

import asyncio
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import asyncpg
import msgspec

from chaos.fleet import pause
from chaos.object_fleet import ObjectWorker
from chaos.object_worker import ObjectAssignment
from ingest.object_rig import Folder, ObjectRig
from keywise.core.clock import boot_time
from running import scaled
from servers.opensearch import OpenSearchServer
from servers.postgres import PostgresServer

LOOK_S = 0.05
READ_AT_ONCE = 5000
INDEX = "logs"
TABLES = """
create table logs (object text collate "C", ordinal bigint, version bigint, body text, primary key (object, ordinal));
create table rewritten (object text, ordinal bigint);
create function note_rewritten() returns trigger language plpgsql as $$ begin
    insert into rewritten values (old.object, old.ordinal);
    return null;
end $$;
create trigger noted after update or delete on logs for each row execute function note_rewritten();
"""
"""Every record of the run is inserted once; a trigger notes those that are written again, or deleted."""
DEPTH = "select (select count(*) from keywise_ready) + (select count(*) from keywise_held)"
COUNTS = """
select object, count(*), count(distinct (body::json ->> 'n')::bigint), min(ordinal), max(ordinal)
from logs group by object
"""


class ObjectSizes(msgspec.Struct, frozen=True, kw_only=True):
    """How many objects of each size there are; all records have the same number of bytes."""

    small: int = 5000
    small_records: int = 10
    medium: int = 200
    medium_records: int = 5_000
    large: int = 2
    large_records: int = 500_000
    record_bytes: int = 1000

    def counts(self) -> dict[str, int]:
        """The number of records of each object, by name."""
        groups = {"s": (self.small, self.small_records), "m": (self.medium, self.medium_records)}
        groups["l"] = (self.large, self.large_records)
        return {f"{kind}{one}": records for kind, (count, records) in groups.items() for one in range(count)}


class ObjectPlan(msgspec.Struct, frozen=True, kw_only=True):
    kills: int
    sizes: ObjectSizes = ObjectSizes()
    workers: int = 3
    every_s: float = 1.0
    """A kill comes so long after the one before it, on average."""
    lease: str = "2s"
    margin: str = "500ms"
    visibility: str = "4s"
    concurrency: int = 4
    part_records: int = 1000
    seed: int = 0
    limit_s: float = 3600.0


class ObjectTally(msgspec.Struct):
    """What happened, and what is wrong with it."""

    on: str
    kills: int = 0
    objects: int = 0
    records: int = 0
    takeovers: int = 0
    repeated: int = 0
    """Records that were written more than once."""
    dead_letters: int = 0
    seconds: float = 0.0
    faults: list[str] = []


def hunt_objects(
    folder: Path,
    plan: ObjectPlan,
    postgres: PostgresServer,
    opensearch: OpenSearchServer | None = None,
    report: Callable[[ObjectTally, int], None] = lambda tally, left: None,
) -> ObjectTally:
    """Queue and ledger are in Postgres; the records go to a table beside them, or to an index."""
    tally = ObjectTally("postgres" if opensearch is None else "opensearch")
    started, counts = boot_time(), plan.sizes.counts()
    sink = f"{postgres.url}?table=logs" if opensearch is None else opensearch.index(INDEX)
    rig = ObjectRig(Folder(folder / "objects"), postgres.url, sink=sink, **_options(plan))
    with asyncio.Runner() as runner:
        runner.run(_prepare(rig, plan.sizes))
        with ExitStack() as stack:
            workers = [_worker(folder, rig, sink, plan, number) for number in range(plan.workers)]
            for worker in workers:
                stack.callback(worker.close)
                worker.start()
            _hunt(workers, plan, tally, lambda: runner.run(_depth(rig)), report)
            for worker in workers:
                worker.drain()
        tally.objects, tally.records = len(counts), sum(counts.values())
        tally.takeovers = sum(note.startswith("taken over") for worker in workers for note in worker.notes)
        letters = runner.run(rig.letters())
        tally.dead_letters = len(letters)
        tally.faults += [f"a dead letter: {letter.key}: {letter.cause}" for letter in letters[:5]]
        if opensearch is None:
            tally.repeated, faults = runner.run(_judge_table(rig, counts))
        else:
            tally.repeated, faults = _judge_index(opensearch, rig, counts, plan, tally.kills)
    tally.faults += faults
    tally.seconds = boot_time() - started
    return tally


def _hunt(
    workers: Sequence[ObjectWorker],
    plan: ObjectPlan,
    tally: ObjectTally,
    depth: Callable[[], int],
    report: Callable[[ObjectTally, int], None],
) -> None:
    """Kill workers until that was done often enough, and wait until the queue is empty."""
    rng, give_up_at, kill_at = random.Random(plan.seed), boot_time() + scaled(plan.limit_s), boot_time()
    while (left := depth()) > 0:
        report(tally, left)
        if boot_time() > give_up_at:
            tally.faults.append(f"{left} messages are left after {plan.limit_s:g} s")
            return
        working = [worker for worker in workers if worker.has_written]
        if tally.kills < plan.kills and working and boot_time() >= kill_at:
            victim = rng.choice(working)
            victim.kill()
            victim.start()
            tally.kills += 1
            kill_at = boot_time() + rng.uniform(0.0, 2 * plan.every_s)
        for worker in workers:
            worker.check()
        pause(LOOK_S)


def _options(plan: ObjectPlan) -> dict[str, Any]:
    cuts = {"part_records": plan.part_records, "concurrency": plan.concurrency}
    return {"lease": plan.lease, "margin": plan.margin, "poll": "100ms", "backoff": "50ms", **cuts}


def _worker(folder: Path, rig: ObjectRig, sink: str, plan: ObjectPlan, number: int) -> ObjectWorker:
    queue, name = f"{rig.ledger}?visibility={plan.visibility}", f"worker{number}"
    notes = str(folder / f"{name}.notes")
    assignment = ObjectAssignment(rig.ledger, queue, rig.place.url, notes, sink=sink, options=_options(plan))
    return ObjectWorker(folder, name, assignment)


async def _prepare(rig: ObjectRig, sizes: ObjectSizes) -> None:
    """Write the objects and announce them, large ones between small ones. Equal objects share their bytes on disk."""
    connection = await asyncpg.connect(rig.ledger)
    await connection.execute(TABLES)
    await connection.close()
    counts = sizes.counts()
    assert isinstance(rig.place, Folder)
    folder, by_count = rig.place.folder, dict[int, Path]()
    for name, count in counts.items():
        path = folder / name
        if count in by_count:
            os.link(by_count[count], path)
        else:
            by_count[count] = path
            with path.open("wb") as file:
                file.writelines(_lines(count, sizes.record_bytes))
    names = list(counts)
    random.Random(1).shuffle(names)
    for start in range(0, len(names), 1000):
        await rig.send(*(rig.place.put_message(name, 1) for name in names[start : start + 1000]))


def _lines(count: int, record_bytes: int) -> Iterator[bytes]:
    filler = b"x" * max(0, record_bytes - len('{"n": 00000000, "x": ""}\n'))
    return (b'{"n": %8d, "x": "%s"}\n' % (number, filler) for number in range(count))


async def _depth(rig: ObjectRig) -> int:
    connection = await asyncpg.connect(rig.ledger)
    try:
        found: int = await connection.fetchval(DEPTH)
        return found
    finally:
        await connection.close()


async def _judge_table(rig: ObjectRig, counts: dict[str, int]) -> tuple[int, list[str]]:
    """Every record is in the table, and was written once."""
    connection = await asyncpg.connect(rig.ledger)
    try:
        found = {row[0]: tuple(row)[1:] for row in await connection.fetch(COUNTS, timeout=600)}
        repeated: int = await connection.fetchval("select count(*) from rewritten")
    finally:
        await connection.close()
    faults = [f"{repeated} records were written again or deleted"] if repeated else []
    for name, count in counts.items():
        held = found.pop(rig.place.uri(name), None)
        if held != (count, count, 0, count - 1):
            faults.append(f"{name} has {count} records, and the table has (rows, records, first, last) {held}")
    return repeated, faults + [f"the table has rows of {uri}, which was never announced" for uri in found]


def _judge_index(
    server: OpenSearchServer, rig: ObjectRig, counts: dict[str, int], plan: ObjectPlan, kills: int
) -> tuple[int, list[str]]:
    """Every record is in the index. Each kill repeats one portion of each object that the worker had, at the most."""
    server.ask("POST", f"/{INDEX}/_refresh")
    held = server.ask("GET", f"/{INDEX}/_count")["count"]
    stats = server.ask("GET", f"/{INDEX}/_stats/indexing")["_all"]["primaries"]["indexing"]
    total = sum(counts.values())
    # A record that was written before has the same version, which the index refuses.
    repeated = stats["index_failed"]
    faults = [f"{total} records were announced, and the index has {held}"] if held != total else []
    most = kills * plan.concurrency * plan.part_records
    if repeated > most:
        faults.append(f"{repeated} records were written again; {kills} kills explain {most}")
    for name, count in counts.items():
        held_numbers = _numbers_of(server, rig.place.uri(name), count)
        missing = [number for number in range(count) if number not in held_numbers]
        if missing:
            faults.append(f"{name} has {count} records, and the index lacks {len(missing)}: {missing[:3]} …")
    return repeated, faults


def _numbers_of(server: OpenSearchServer, uri: str, count: int) -> set[int]:
    """The numbers of the records that the index holds under their own keys."""
    found: set[int] = set()
    for start in range(0, count, READ_AT_ONCE):
        ids = [f"{uri}#{number}" for number in range(start, min(start + READ_AT_ONCE, count))]
        documents = server.ask("POST", f"/{INDEX}/_mget?_source=n", {"ids": ids})["docs"]
        found |= {
            one["_source"]["n"] for one in documents if one["found"] and one["_id"] == f"{uri}#{one['_source']['n']}"
        }
    return found
