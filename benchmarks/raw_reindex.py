"""The raw limit of a reindex: bare loops of the client libraries that read a table and write its rows.

Nothing else is there: no claim, no position to go on from, no generation, no retry, no dead letter, no events.
"""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from keywise.adapters.http.client import HttpClient

TABLE = """
create table origin (id text collate "C" primary key, version bigint not null, kind text not null, text text not null);
insert into origin
select md5(number::text)::uuid::text, 1 + number % 7, 'page', rpad('page ' || number, {size}, ' lorem ipsum dolor')
from generate_series(1, {rows}) as one (number);
"""
TARGET = 'create table if not exists pages (key text collate "C" primary key, version bigint, body text)'
PLANS = "set enable_sort = off; set enable_bitmapscan = off"
"""A page in the order of the index; the planner would sort a large part of the table for an early page of it."""
SCAN = """
select id, version, row_to_json(origin.*)::text from origin where id > $1 order by id limit $2
"""
# In place, a row at the version that is there is written again, as a reindex does.
UPSERT = """
insert into pages (key, version, body)
select k, v, b
from unnest(string_to_array($1, $4), $2::text::bigint[], string_to_array($3, $4)) as one (k, v, b)
on conflict (key) do update set version = excluded.version, body = excluded.body
where pages.version {sign} excluded.version
"""
SEPARATOR = "\x1f"
"""In no key and in no row. The client library needs longer to encode a list than a text that is split."""
UPSERT_ROWS, BULK_ROWS = 2000, 1000
"""The pages with which these loops are fastest."""
LINES = {"Content-Type": "application/x-ndjson"}

Row = tuple[str, int, str]
"""The key, the version and the row as JSON."""


async def upsert(reader: Any, writer: Any, *, again: bool) -> int:
    """Write all rows page by page, each in a transaction; return how many. `again`: also at an equal version."""
    statement, rows = UPSERT.format(sign="<=" if again else "<"), 0
    async for page in _pages(reader, UPSERT_ROWS):
        keys, versions, bodies = zip(*page, strict=True)
        numbers = f"{{{','.join(map(str, versions))}}}"
        await writer.execute(statement, SEPARATOR.join(keys), numbers, SEPARATOR.join(bodies), SEPARATOR)
        rows += len(page)
    return rows


async def bulk(reader: Any, client: HttpClient, index: str, *, again: bool) -> int:
    """Send all rows page by page, each in a request; return how many. `again`: also at an equal version."""
    kind, path, rows = "external_gte" if again else "external", f"/{index}/_bulk?filter_path=errors", 0
    async for page in _pages(reader, BULK_ROWS):
        lines = []
        for key, version, body in page:
            head = {"_id": key, "version": version, "version_type": kind}
            lines.append(b"%b\n%b\n" % (msgspec.json.encode({"index": head}), body.encode()))
        answer = await client.request("POST", path, body=b"".join(lines), headers=LINES, timeout_s=60)
        assert answer.body == b'{"errors":false}', answer.body
        rows += len(page)
    return rows


async def _pages(reader: Any, limit: int) -> AsyncIterator[Sequence[Row]]:
    after = ""
    while page := await reader.fetch(SCAN, after, limit):
        yield page
        after = page[-1][0]
