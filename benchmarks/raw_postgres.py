"""The raw limit on Postgres: a bare loop with one durable transaction per batch, where the newest version wins.

Nothing else is there: no retry, no dead letter, no lease, no history, no events.
"""

from typing import Any

import asyncpg

from benchmarks.workload import decode

SCHEMA = """
create table if not exists queue (id bigint generated always as identity primary key, body bytea not null);
create table if not exists marks (key text primary key, version bigint not null, updated_at timestamptz not null);
create table if not exists pages (key text primary key, version bigint not null, body bytea not null);
"""
RECEIVE = """
delete from queue where id = any(array(select id from queue order by id limit $1 for update skip locked))
returning id, body
"""
MARK_AND_WRITE = """
with won as (
    insert into marks as known
    select key, version, clock_timestamp() from unnest($1::text[], $2::bigint[]) as one (key, version) order by key
    on conflict (key) do update set version = excluded.version, updated_at = excluded.updated_at
    where excluded.version > known.version
    returning key)
insert into pages
select key, version, body from unnest($1::text[], $2::bigint[], $3::bytea[]) as one (key, version, body)
join won using (key)
on conflict (key) do update set version = excluded.version, body = excluded.body
"""


async def connect(url: str) -> Any:
    return await asyncpg.connect(url)


async def send(connection: Any, bodies: list[bytes]) -> None:
    """Append to the queue, durably once it returns."""
    rows = [(body,) for body in bodies]
    await connection.copy_records_to_table("queue", columns=["body"], records=rows)


async def drain_batch(connection: Any, batch: int) -> int:
    """Bring up to `batch` changes to an end; return how many there were."""
    async with connection.transaction():
        rows = await connection.fetch(RECEIVE, batch)
        newest: dict[str, tuple[int, bytes]] = {}
        for _, body in rows:
            change = decode(body)
            key, version = change.content_id, change.payload_version
            if key not in newest or version > newest[key][0]:
                newest[key] = (version, body)
        if newest:
            keys = sorted(newest)
            versions, bodies = [newest[key][0] for key in keys], [newest[key][1] for key in keys]
            await connection.execute(MARK_AND_WRITE, keys, versions, bodies)
    return len(rows)
