"""The store that everybody writes to: one table, and a trigger that notes each write that is not newer.

The trigger compares two numbers of a row that is written anyway, and does more only if something has to be noted.
"""

import asyncpg

from benchmarks.peers.checker import Rewrite

SCHEMA = """
create table pages (key text primary key, version bigint not null, body text not null);
create unlogged table rewrites (key text not null, before bigint not null, version bigint not null);
create function note_rewrite() returns trigger language plpgsql as $$
    begin insert into rewrites values (new.key, old.version, new.version); return null; end $$;
create trigger note_rewrite after update on pages for each row
    when (new.version <= old.version) execute function note_rewrite();
"""
UPSERT = (
    "insert into pages (key, version, body) values ($1, $2, $3) "
    "on conflict (key) do update set version = excluded.version, body = excluded.body"
)
"""What every one-change handler does. It does not compare: most stores that keywise is for cannot."""


async def create(url: str) -> None:
    connection = await asyncpg.connect(url)
    await connection.execute(SCHEMA)
    await connection.close()


async def refresh(url: str) -> None:
    """What autovacuum does some time after a queue was filled, for everybody before the clock starts."""
    connection = await asyncpg.connect(url)
    await connection.execute("vacuum analyze")
    await connection.execute("checkpoint")
    await connection.close()


async def read(url: str) -> tuple[dict[str, int], list[Rewrite]]:
    """The version of each key, and the writes that were not newer."""
    connection = await asyncpg.connect(url)
    try:
        stored = dict(await connection.fetch("select key, version from pages"))
        rewrites = await connection.fetch("select key, before, version from rewrites")
        return stored, [Rewrite(*row) for row in rewrites]
    finally:
        await connection.close()
