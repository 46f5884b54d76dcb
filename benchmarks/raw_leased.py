"""The raw limit of claims on Postgres: receive, claim, commit and ack are one conditional statement each.

Nothing is handled between claim and commit, and there are no rules, lanes, events or heartbeats. The four stages run
side by side, each on a connection of its own. A key that is claimed already is skipped, so keys have to be distinct.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from benchmarks.workload import decode

AHEAD = 3
"""How many batches wait between two stages."""
SCHEMA = """
create table ready (id bigint generated always as identity primary key, body bytea not null);
create table held (id bigint primary key, visible_at timestamptz not null, body bytea not null);
create table leased_marks (key text primary key, version bigint not null, is_active boolean not null)
    with (fillfactor = 70);
create table claims (key text primary key, token bigint not null, lease_until timestamptz not null);
create sequence tokens;
"""
RECEIVE = """
with taken as (
    delete from ready where id = any(array(select id from ready order by id limit $1 for update skip locked))
    returning id, body)
insert into held select id, clock_timestamp() + interval '60 s', body from taken returning id, body
"""
CLAIM = """
with marked as (
    insert into leased_marks as mark
    select key, version, true from unnest($1::text[], $2::bigint[]) as one (key, version) order by key
    on conflict (key) do update set is_active = true where not mark.is_active and mark.version < excluded.version
    returning key)
insert into claims
select key, nextval('tokens'), clock_timestamp() + interval '30 s' from marked
returning key, token
"""
COMMIT = """
with mine as (
    delete from claims using unnest($1::text[], $2::bigint[], $3::bigint[]) as one (key, version, token)
    where claims.key = one.key and claims.token = one.token
    returning one.key, one.version)
update leased_marks as mark set version = mine.version, is_active = false from mine where mark.key = mine.key
"""
ACK = "delete from held where id = any($1::bigint[])"
PLANS = "set jit = off; set enable_seqscan = off; set enable_hashjoin = off; set enable_mergejoin = off"
"""A plan that was made while the tables were empty would read them whole."""


async def drain(connections: Sequence[Any], batch: int) -> dict[str, int]:
    """Drain `ready` with four connections; return the version of each key that was committed."""
    receiving, claiming, committing, acking = connections
    received, claimed, committed = (asyncio.Queue[Any](AHEAD) for _ in range(3))
    found: dict[str, int] = {}

    async def receive() -> None:
        while rows := await receiving.fetch(RECEIVE, batch):
            await received.put(rows)
        await received.put(None)

    async def claim() -> None:
        while rows := await received.get():
            changes = [decode(body) for _, body in rows]
            versions = {change.content_id: change.payload_version for change in changes}
            keys = sorted(versions)
            granted = await claiming.fetch(CLAIM, keys, [versions[key] for key in keys])
            await claimed.put((rows, versions, granted))
        await claimed.put(None)

    async def commit() -> None:
        while work := await claimed.get():
            rows, versions, granted = work
            keys, tokens = zip(*sorted(granted), strict=True)
            done = {key: versions[key] for key in keys}
            await committing.execute(COMMIT, list(keys), list(done.values()), list(tokens))
            found.update(done)
            await committed.put(rows)
        await committed.put(None)

    async def ack() -> None:
        while rows := await committed.get():
            await acking.execute(ACK, [number for number, _ in rows])

    await asyncio.gather(receive(), claim(), commit(), ack())
    return found
