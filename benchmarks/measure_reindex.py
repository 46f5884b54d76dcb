"""Reindex: rows of a Postgres table into another table and into OpenSearch, beside bare loops that do the same."""

import statistics
import sys
from collections.abc import Callable, Sequence
from itertools import count

import msgspec

from benchmarks.drain_reindex import Reindexed, ReindexJob
from benchmarks.figure import Figure, Scale
from benchmarks.machine import ROOT, Bystander, run_module
from benchmarks.measure_opensearch import AS_IT_COMES
from benchmarks.measure_postgres import durable_server
from benchmarks.raw_reindex import BULK_ROWS, UPSERT_ROWS

sys.path.insert(0, str(ROOT / "tests"))

from servers.machine import MissingServerError
from servers.opensearch import HEAP, OpenSearchServer, opensearch_server
from servers.postgres import PostgresServer

TABLE_RATIO, INDEX_RATIO = 0.7, 0.8
LINEAR = 0.8
"""How fast a reindex is with the most rows, as a part of its speed with few: the least."""
FIELDS = {"id": "keyword", "version": "long", "kind": "keyword", "text": "text"}
LIMIT_S = 3600
Turns = dict[str, list[Reindexed]]
Reindex = Callable[[str, ReindexJob], Reindexed]


def measure(scale: Scale) -> list[Figure]:
    """On a durable Postgres with the settings that it comes with, which also has the ledger, and on OpenSearch."""
    try:
        with durable_server() as server:
            return [*_table(scale, server), *_many_rows(scale, server), *_index(scale, server)]
    except MissingServerError as error:
        return [Figure("table, keywise / bare loop", None, "", str(error), at_least=TABLE_RATIO)]


def reindexed(server: PostgresServer, what: str, job: ReindexJob) -> Reindexed:
    """One reindex in a fresh process and a fresh database, into a sink that is empty unless it is done `again`."""
    job = msgspec.structs.replace(job, url=server.create_database(f"reindex_{next(_numbers)}"))
    if job.again:
        _run(what, msgspec.structs.replace(job, again=False))
    return _run(what, job)


_numbers = count()


def _table(scale: Scale, server: PostgresServer) -> list[Figure]:
    job = ReindexJob("", scale.reindex_rows)
    turns, others = _by_turns(scale, ("bare", "in_place", "beside"), job, lambda *one: reindexed(server, *one))
    full = msgspec.structs.replace(job, again=True)
    again, _ = _by_turns(scale, ("bare", "in_place"), full, lambda *one: reindexed(server, *one), rounds_max=3)
    bare, in_place, beside = map(_median, turns.values())
    ratio, note = _ratio(turns["bare"], turns["in_place"])
    again_ratio, again_note = _ratio(*again.values())
    about = f"{job.rows:,} rows of about 300 bytes; ledger and both tables in one database"
    return [
        Figure("table, bare loop", bare.rows_per_s, "rows/s", f"pages of {UPSERT_ROWS:,} rows; {_cpu(bare)}"),
        Figure("table, keywise", in_place.rows_per_s, "rows/s", f"{about}; {_cpu(in_place)}"),
        Figure(
            "table, keywise / bare loop",
            ratio,
            "",
            note,
            at_least=TABLE_RATIO,
            detail={"job": job, "turns": turns, "others": others},
        ),
        Figure(
            "table, keywise, complete run",
            in_place.total_s,
            "s",
            f"with the sweep, and up to a second before each stage; the scan: {job.rows / in_place.rows_per_s:.2f} s",
        ),
        Figure("table beside, keywise", beside.rows_per_s, "rows/s", f"into a new table; {_cpu(beside)}"),
        Figure("full table again, keywise / bare loop", again_ratio, "", again_note, detail={"turns": again}),
    ]


def _many_rows(scale: Scale, server: PostgresServer) -> list[Figure]:
    """The same with as few and as many rows, one after the other, so that both meet the same machine."""
    rows = (scale.reindex_rows, scale.reindex_rows_max)
    jobs = [ReindexJob("", one) for one in rows]
    few, many = (reindexed(server, "in_place", job) for job in jobs)
    bare_few, bare_many = (reindexed(server, "bare", job) for job in jobs)
    bare = bare_many.rows_per_s / bare_few.rows_per_s
    return [
        Figure(f"table, keywise, {rows[1]:,} rows", many.rows_per_s, "rows/s", f"complete run: {many.total_s:.0f} s"),
        Figure(
            f"table, keywise, {rows[1]:,} rows / {rows[0]:,} rows",
            many.rows_per_s / few.rows_per_s,
            "",
            f"speed by speed, one turn each; the bare loop: {bare:.2f}",
            at_least=LINEAR,
            detail={"few": few, "many": many, "bare_few": bare_few, "bare_many": bare_many},
        ),
    ]


def _index(scale: Scale, server: PostgresServer) -> list[Figure]:
    try:
        with opensearch_server(None, jvm=HEAP, **AS_IT_COMES) as engine:
            return _indexed(scale, server, engine)
    except MissingServerError as error:
        return [Figure("index, keywise / bare loop", None, "", str(error), at_least=INDEX_RATIO)]


def _indexed(scale: Scale, server: PostgresServer, engine: OpenSearchServer) -> list[Figure]:
    job, names = ReindexJob("", scale.reindex_rows), ("bare", "in_place")

    def into_index(what: str, one: ReindexJob) -> Reindexed:
        index = f"reindex_{next(_numbers)}"
        engine.index(index, FIELDS)
        done = reindexed(server, what, msgspec.structs.replace(one, opensearch=f"{engine.port}/{index}"))
        engine.ask("DELETE", f"/{index}")  # So that the engine has the same work each time.
        return done

    for what in names:
        into_index(what, job)  # The engine's compiler is busy with the first documents.
    turns, others = _by_turns(scale, names, job, into_index)
    bare, in_place = map(_median, turns.values())
    ratio, note = _ratio(*turns.values())
    return [
        Figure("index, bare loop", bare.rows_per_s, "rows/s", f"requests of {BULK_ROWS:,} rows; {_cpu(bare)}"),
        Figure("index, keywise", in_place.rows_per_s, "rows/s", f"ledger in Postgres; {_cpu(in_place)}"),
        Figure(
            "index, keywise / bare loop",
            ratio,
            "",
            note,
            at_least=INDEX_RATIO,
            detail={"job": job, "turns": turns, "others": others},
        ),
        Figure("index, keywise, complete run", in_place.total_s, "s", f"{job.rows:,} rows, with the sweep"),
    ]


def _by_turns(
    scale: Scale, names: Sequence[str], job: ReindexJob, reindex: Reindex, *, rounds_max: int | None = None
) -> tuple[Turns, float]:
    """Run each as often as there are rounds; also return how busy the machine was with other work."""
    turns: Turns = {what: [] for what in names}
    with Bystander() as bystander:
        for turn in range(min(scale.rounds, rounds_max or scale.rounds)):
            # Who goes first changes: the disk is still busy with what the one before left behind.
            for what in names if turn % 2 == 0 else reversed(names):
                turns[what].append(reindex(what, job))
    return turns, bystander.others


def _run(what: str, job: ReindexJob) -> Reindexed:
    found = run_module("benchmarks.drain_reindex", [what, *job.arguments()], limit_s=LIMIT_S)
    return msgspec.convert(found, Reindexed)


def _median(done: Sequence[Reindexed]) -> Reindexed:
    return Reindexed(*(statistics.median(getattr(one, name) for one in done) for name in Reindexed.__struct_fields__))


def _ratio(bare: Sequence[Reindexed], keywise: Sequence[Reindexed]) -> tuple[float, str]:
    """The ratio of the median speeds, and a note with the ratios of the turns."""
    paired = [k.rows_per_s / b.rows_per_s for b, k in zip(bare, keywise, strict=True)]
    note = f"medians of {len(paired)}, turn by turn {min(paired):.2f} to {max(paired):.2f}"
    return _median(keywise).rows_per_s / _median(bare).rows_per_s, note


def _cpu(one: Reindexed) -> str:
    return f"{one.cpu_us_per_row:.1f} µs of CPU a row in the client"
