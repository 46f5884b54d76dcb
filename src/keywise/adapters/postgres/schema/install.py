"""The tables of keywise in a Postgres database: created when it is opened first, and refused if another version did."""

from typing import Any

from keywise.adapters.postgres.serial.sql_locking import LOCKING
from keywise.adapters.postgres.serial.sql_steps import STEPS
from keywise.adapters.postgres.serial.sql_tables import TABLES
from keywise.adapters.postgres.serial.sql_taking import TAKING
from keywise.core.statements import check_schema, read_sql

VERSION = 5
"""Of the tables. Versions 1 to 4 have other tables and columns."""
LOCKS = 0x6B657977
"""The first number of every advisory lock of keywise; the second is a scope, or 0 for the schema."""


async def install(connection: Any, name: str) -> None:
    """Create the tables; of several processes that try at once, one does it."""
    if await _is_installed(connection, name):
        return
    async with connection.transaction():
        await connection.execute(f"select pg_advisory_xact_lock({LOCKS}, 0)")
        # Before the second look: else it might not yet see what another process has just created.
        await connection.execute("create table if not exists keywise_meta (name text primary key, value text not null)")
        if await _is_installed(connection, name):
            return
        await connection.execute(read_sql(__package__, "tables.sql") + TABLES + STEPS + TAKING + LOCKING)
        await connection.execute("insert into keywise_meta values ('schema', $1)", str(VERSION))


async def _is_installed(connection: Any, name: str) -> bool:
    """Whether the tables are there; those of another version are refused."""
    if await connection.fetchval("select to_regclass('keywise_meta')") is None:
        return False
    found: str | None = await connection.fetchval("select value from keywise_meta where name = 'schema'")
    if found is None:
        return False
    check_schema(found, VERSION, name, "database")
    return True
