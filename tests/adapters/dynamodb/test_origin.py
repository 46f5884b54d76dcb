"""An origin on DynamoDB reads every row of its table, consistently, page by page."""

import msgspec
import pytest

from adapters.dynamodb.benches import created, origin_of, sink_of
from adapters.dynamodb.test_sink import applied
from keywise.adapters.dynamodb.origin import DynamoOrigin
from keywise.core.errors import ThrottledError, UnavailableError
from keywise.core.origin import CURSOR_MAX_BYTES, Shard
from keywise.testing.conformance.sinks import gone, put
from running import awaited, run
from servers import shared
from servers.dynamodb_faults import dynamodb_faults

pytestmark = pytest.mark.server("dynamodb")


def fill(table: str, count: int, size: int = 10) -> None:
    """Write rows k0, k1, …, each with a text of so many characters."""
    server, text = shared.dynamodb(), {"S": "x" * size}
    for start in range(0, count, 25):
        items = [
            {"id": {"S": f"k{number}"}, "version": {"N": str(number)}, "text": text}
            for number in range(start, min(start + 25, count))
        ]
        requests = [{"PutRequest": {"Item": item}} for item in items]
        # A batch has 16 MB at the most.
        for half in (requests[:12], requests[12:]):
            if half:
                assert server.ask("BatchWriteItem", RequestItems={table: half})["UnprocessedItems"] == {}


def delete(table: str, key: str) -> None:
    shared.dynamodb().ask("DeleteItem", TableName=table, Key={"id": {"S": key}})


async def pages(origin: DynamoOrigin, shard: Shard, limit: int) -> list[list[str]]:
    """The keys of each page of a shard, to its end."""
    found: list[list[str]] = []
    after, is_last = "", False
    while not is_last:
        page = await origin.scan(shard, after, limit)
        assert page.after and len(page.after.encode()) <= CURSOR_MAX_BYTES and len(page.rows) <= limit
        found.append([msgspec.json.decode(row)["id"] for row in page.rows])
        after, is_last = page.after, page.is_last
    return found


@awaited
async def test_shards_cover_every_row_exactly_once():
    table = created()
    fill(table, 300)
    async with origin_of(table) as origin:
        shards = await origin.shards(50)
        assert len(shards) == len({shard.name for shard in shards}) == 6
        assert shards == await origin.shards(50)
        assert sum(shard.rows or 0 for shard in shards) == 300
        keys = [key for shard in shards for page in await pages(origin, shard, 7) for key in page]
    assert sorted(keys) == sorted(f"k{number}" for number in range(300))


@awaited
async def test_an_empty_table_has_a_shard_without_rows():
    async with origin_of(created()) as origin:
        [shard] = await origin.shards(1000)
        page = await origin.scan(shard, "", 100)
        assert (page.rows, page.is_last) == ([], True)
        assert await origin.scan(shard, page.after, 100) == page
    async with origin_of(created(), segments="12") as origin:
        assert len(await origin.shards(1000)) == 12


def test_a_segment_of_three_megabytes_is_read_to_the_end():
    table = created()
    fill(table, 12, size=300_000)

    async def story() -> list[list[str]]:
        async with origin_of(table) as origin:
            [shard] = await origin.shards(1000)
            return await pages(origin, shard, 1000)

    found = run(story())
    assert len(found) >= 3, "a page has 1 MB"
    assert sorted(key for page in found for key in page) == sorted(f"k{number}" for number in range(12))


@awaited
async def test_rows_that_are_deleted_while_they_are_scanned_take_no_other_with_them():
    table = created()
    fill(table, 60)
    async with origin_of(table) as origin:
        [shard] = await origin.shards(1000)
        seen: list[str] = []
        after, is_last, deleted = "", False, set[str]()
        while not is_last:
            page = await origin.scan(shard, after, 10)
            keys = [msgspec.json.decode(row)["id"] for row in page.rows]
            seen += keys
            after, is_last = page.after, page.is_last
            # The row at the cursor, and one that is perhaps still to come.
            for key in (*keys[-1:], f"k{len(seen)}"):
                delete(table, key)
                deleted.add(key)
    assert len(seen) == len(set(seen))
    assert {f"k{number}" for number in range(60)} - deleted <= set(seen)


@awaited
async def test_a_row_is_the_whole_item_with_all_digits_and_a_tombstone_is_none():
    table = created()
    item = {"id": {"S": "a"}, "version": {"N": "7"}, "price": {"N": "0.10"}, "tags": {"SS": ["y", "x"]}}
    shared.dynamodb().ask("PutItem", TableName=table, Item=item)
    async with sink_of(table) as sink:
        await applied(sink, gone("deleted", 1))
    async with origin_of(table) as origin:
        [shard] = await origin.shards(10)
        wanted = b'{"id":"a","price":0.1,"tags":["x","y"],"version":7}'
        assert (await origin.scan(shard, "", 10)).rows == [wanted]
        assert await origin.fetch(["a", "deleted", "never", "a"]) == {"a": wanted}
        assert await origin.fetch([]) == {}
        assert origin.is_consistent


@awaited
async def test_keys_that_a_batch_leaves_out_are_read_again():
    table = created()
    fill(table, 250)
    keys = [f"k{number}" for number in range(250)]
    async with dynamodb_faults(shared.dynamodb().url) as proxy, origin_of(table, proxy.url) as origin:
        proxy.skip_every = 3
        assert (await origin.fetch([*keys, "none"])).keys() == set(keys)
        assert proxy.skipped > 50
        assert all(len(asked["RequestItems"][table]["Keys"]) <= 100 for asked in proxy.of("BatchGetItem"))
        assert all(asked["RequestItems"][table]["ConsistentRead"] for asked in proxy.of("BatchGetItem"))
        proxy.skips_all = True
        with pytest.raises(ThrottledError, match="answered none of 100 keys"):
            await origin.fetch(keys)


@awaited
async def test_throttling_is_left_to_the_caller_and_the_cursor_stays():
    table = created()
    fill(table, 50)
    async with dynamodb_faults(shared.dynamodb().url) as proxy, origin_of(table, proxy.url) as origin:
        [shard] = await origin.shards(100)
        proxy.throttle_every, throttled = 3, 0
        keys: list[str] = []
        after, is_last = "", False
        while not is_last:
            try:
                page = await origin.scan(shard, after, 5)
            except ThrottledError:
                throttled += 1
                continue
            keys += [msgspec.json.decode(row)["id"] for row in page.rows]
            after, is_last = page.after, page.is_last
        assert throttled == proxy.throttled > 0
        assert all(asked["ConsistentRead"] for asked in proxy.of("Scan"))
        proxy.throttle_every, proxy.lose_every = 0, 1
        with pytest.raises(UnavailableError):
            await origin.scan(shard, "", 5)
    assert sorted(keys) == sorted(f"k{number}" for number in range(50))


@awaited
async def test_what_a_sink_has_written_is_read_as_it_was_sent():
    table = created()
    async with sink_of(table) as sink, origin_of(table) as origin:
        await applied(sink, put("a", 3, "ünï"))
        row = (await origin.fetch(["a"]))["a"]
        assert msgspec.json.decode(row) == {"id": "a", "key": "a", "version": 3, "text": "ünï"}
