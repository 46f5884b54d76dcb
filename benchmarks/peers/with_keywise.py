"""keywise: its queue, its ledger and the table in one Postgres, in one process, with the default observers."""

from pathlib import Path

import msgspec

import keywise
from benchmarks.peers.entrance import enter
from benchmarks.peers.handler import Writer
from benchmarks.peers.place import Place
from benchmarks.peers.record import Kind, Recorder, clock_ns
from benchmarks.peers.sampler import Sampler
from benchmarks.peers.store import UPSERT
from keywise import Change, Transaction
from keywise.app import PipelineDefinition
from keywise.core.events import Event, Settled

PIPELINE = "pages"
UPSERT_ALL = (
    "insert into pages (key, version, body) select * from unnest($1::text[], $2::bigint[], $3::text[]) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)


async def fill(place: Place) -> None:
    app, _ = app_at(place)
    async with app:
        await app.send(PIPELINE, *place.bodies())


async def work(place: Place) -> None:
    app, pipeline = app_at(place)
    connections = int(place.settings.get("concurrency", 1))
    async with Writer(place, connections, Kind.CALLED) as writer:
        app.observers.append(lambda event: tell(writer.recorder, event))
        HOW[place.settings["how"]](pipeline, place, writer)
        sampler = Sampler()
        if place.is_sampled:
            sampler.start()
        await app.run()
        if place.is_sampled:
            write_shares(place, sampler.stop())


def write_shares(place: Place, shares: dict[str, float]) -> None:
    Path(place.shares).write_bytes(msgspec.json.encode(shares))


def app_at(place: Place) -> tuple[keywise.App, PipelineDefinition]:
    app = keywise.App(place.postgres)
    options = {name: value for name, value in place.settings.items() if name != "how"}
    pipeline = app.pipeline(PIPELINE, key="content_id", version="payload_version", **options)
    return app, pipeline.source(place.postgres)


def tell(recorder: Recorder, event: Event) -> None:
    """Changes count once they are committed and acked, whatever became of them."""
    if isinstance(event, Settled):
        recorder.settled(event.changes)


def into_table(pipeline: PipelineDefinition, place: Place, writer: Writer) -> None:
    """The table sink: no handler at all."""
    pipeline.sink(f"{place.postgres}?table=pages")


def by_batch(pipeline: PipelineDefinition, place: Place, writer: Writer) -> None:
    """A batch handler: one statement for many changes, inside the transaction."""

    async def write(changes: list[Change[dict[str, object]]], transaction: Transaction) -> None:
        began_ns = clock_ns()
        columns = zip(*((change.key, change.version, change.body.decode()) for change in changes), strict=True)
        await transaction.connection.execute(UPSERT_ALL, *columns)
        writer.recorder.note_all(Kind.CALLED, ((change.key, change.version or 0) for change in changes), began_ns)

    pipeline.apply(write)


def one_by_one(pipeline: PipelineDefinition, place: Place, writer: Writer) -> None:
    """The same one-change handler as everybody's: it knows nothing of the transaction."""

    async def write(change: Change[dict[str, object]]) -> None:
        await writer.write(change.key, change.version or 0, change.body)

    pipeline.apply(write)


def one_in_transaction(pipeline: PipelineDefinition, place: Place, writer: Writer) -> None:
    """A one-change handler that writes inside the ledger's transaction."""

    async def write(change: Change[dict[str, object]], transaction: Transaction) -> None:
        began_ns = clock_ns()
        await transaction.connection.execute(UPSERT, change.key, change.version, change.body.decode())
        writer.recorder.note(Kind.CALLED, change.key, change.version or 0, began_ns)

    pipeline.apply(write)


HOW = {"table": into_table, "batch": by_batch, "one": one_by_one, "transaction": one_in_transaction}

if __name__ == "__main__":
    enter(fill, work)
