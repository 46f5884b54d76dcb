"""What a Redis ledger does when its server is restarted, loses data, runs out of memory or is set wrongly."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from adapters.redis.benches import fresh
from keywise.adapters.redis import database as redis_module
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger import working_set as redis_book
from keywise.adapters.redis.ledger.ledger import RedisLedger, connect
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.entry import Commit, LeaseTerms, LedgerPolicy, RefusalReason
from keywise.core.errors import AddressError, DatabaseError, SettingsError, UnavailableError
from keywise.core.history import HistoryRecord
from keywise.core.url import Address
from keywise.testing.conformance.benches.redis import RedisBench
from running import run
from servers import machine, shared
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

TERMS = LeaseTerms("w1", 60.0)
PLAIN = LedgerPolicy(intents=True)


class Step:
    """Lets the event loop go round once."""

    def __await__(self) -> Iterator[None]:
        yield


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of its own, which may be stopped."""
    with redis_server() as server:
        yield server


def ledger_on(server: RedisServer, name: str = "shop", policy: LedgerPolicy = PLAIN, **options) -> RedisLedger:
    return RedisLedger(RedisDatabase(server.url), name, policy, **options)


def headers(*versions: tuple[str, int]) -> list[ChangeHeader]:
    return [ChangeHeader(key, order_of(version)) for key, version in versions]


async def committed(ledger: RedisLedger, *versions: tuple[str, int]) -> None:
    results = await ledger.claim(headers(*versions), TERMS)
    assert len(results.granted) == len(versions)
    assert await ledger.commit([Commit(claim) for claim in results.granted]) == []


async def reached(ledger: RedisLedger) -> None:
    """Ask until the server answers again; connections from before are given up one by one."""
    while True:
        try:
            await ledger.counts()
        except UnavailableError:
            continue
        return


def test_a_restart_on_its_file_loses_nothing(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, ("a", 5))
            held = (await ledger.claim(headers(("b", 1)), TERMS)).granted
            server.restart()
            await reached(ledger)
            results = await ledger.claim(headers(("a", 4), ("b", 2)), TERMS)
            assert {key: one.reason for key, one in results.refused.items()} == {
                "a": RefusalReason.STALE,
                "b": RefusalReason.BUSY,
            }
            assert await ledger.commit([Commit(claim) for claim in held]) == []
            assert (ledger.losses, (await ledger.control_store.controls()).resync_at) == (0, 0.0)

    run(story())


def test_a_server_that_lost_everything_is_found_out(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, ("a", 5))
            [held] = (await ledger.claim(headers(("b", 1)), TERMS)).granted
            server.lose()
            server.start()
            await reached(ledger)
            assert ledger.losses == 1
            assert (await ledger.control_store.controls()).resync_at > 0, "it is said to everybody"
            assert await ledger.commit([Commit(held)]) == [held], "its claim is gone"
            assert (await ledger.inspect("b")).suspicions == 1, "and its write is in doubt"
            await committed(ledger, ("a", 4))
            assert ledger.losses == 1, "it is told once"
        async with ledger_on(server) as later:
            assert later.losses == 0
            assert (await later.control_store.controls()).resync_at > 0, "also to those who come later"

    run(story())


def test_a_loss_is_found_out_though_others_wrote_before(server):
    """Somebody who knows nothing of what was lost may be the first; whoever wrote it knows all the same."""

    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, ("a", 5))
            server.lose()
            server.start()
            async with ledger_on(server) as newcomer:
                for version in range(1, 20):
                    await committed(newcomer, ("b", version))
            await reached(ledger)
            assert ledger.losses == 1

    run(story())


def test_a_power_cut_that_takes_the_last_writes_is_found_out(server):
    """The last marks are in the file no more: as if they had not been written to the disk in time."""

    async def story() -> None:
        async with ledger_on(server) as ledger, ledger_on(server) as other:
            await committed(ledger, ("a", 5))
            before = server.read_file()
            await committed(ledger, ("a", 6))
            await committed(other, ("c", 1))
            server.stop()
            server.write_file(before)
            server.start()
            for one in (other, ledger):
                await reached(one)
                assert one.losses == 1
            assert (await ledger.inspect("a")).mark == order_of(5), "what was in the file is still there"

    run(story())


def test_when_memory_is_used_up_claims_wait_and_work_ends(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            held = (await ledger.claim(headers(("a", 5), ("b", 5)), TERMS)).granted
            assert server.command("CONFIG", "SET", "maxmemory", "1mb").startswith("+OK")
            with pytest.raises(UnavailableError, match="maxmemory"):
                await ledger.claim(headers(("c", 1)), TERMS)
            with pytest.raises(UnavailableError, match="maxmemory"):
                await ledger.history_store.record([HistoryRecord(1.0, "stale", "a")] * 2)
            await ledger.history_store.record([HistoryRecord(1.0, "pruned")])
            assert [line.what for line in await ledger.history_store.history(None, 9)] == ["pruned"], "an act is told"
            assert await ledger.commit([Commit(claim) for claim in held[:1]]) == [], "what has begun can end"
            await ledger.release(held[1:])
            assert (await ledger.inspect("a")).mark == order_of(5)
            server.command("CONFIG", "SET", "maxmemory", "0")
            await committed(ledger, ("c", 1))

    run(story())


def test_scripts_that_were_flushed_are_given_again(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, ("a", 5))
            assert server.command("SCRIPT", "FLUSH").startswith("+OK")
            await committed(ledger, ("a", 6))

    run(story())


def test_a_server_that_is_away_is_unavailable_and_comes_back(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, ("a", 5))
            server.stop()
            with pytest.raises(UnavailableError, match="redis://"):
                await ledger.counts()
            with pytest.raises(UnavailableError):
                async with ledger_on(server):
                    pass
            server.start()
            await reached(ledger)
            await committed(ledger, ("a", 6))

    run(story())


@pytest.mark.parametrize("is_connected", [True, False], ids=["connected", "connecting"])
def test_whoever_is_cancelled_ends_whatever_it_waits_for(is_connected):
    """However many steps of the event loop the command has come before."""

    async def story() -> None:
        async with RedisDatabase(shared.redis().url) as database:
            for steps in range(30):
                if not is_connected:
                    await database._drop(*database._free)
                asked = asyncio.create_task(database.run("TIME"))
                for _ in range(steps):
                    await Step()
                is_over = asked.done()
                asked.cancel()
                await asyncio.wait([asked])
                assert is_over or asked.cancelled(), f"after {steps} steps it went on"
            assert await database.now() > 0

    run(story())


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"maxmemory-policy": "allkeys-lru"}, "maxmemory-policy noeviction"),
        ({"cluster-enabled": "yes"}, "no cluster"),
        ({"replicaof": "127.0.0.1 1"}, "name its master"),
    ],
    ids=["eviction", "cluster", "replica"],
)
def test_a_server_that_would_lose_marks_is_refused_with_what_to_do(settings, told):
    # Chosen now: one that was free when the tests were collected may be taken.
    ports = {"cluster-port": str(machine.free_port())} if "cluster-enabled" in settings else {}
    with redis_server(**settings, **ports) as server, pytest.raises(DatabaseError, match=told):
        run(opened(server))


def test_a_server_that_is_too_old_is_refused(server, monkeypatch):
    monkeypatch.setattr(redis_module, "OLDEST", (99, 0))
    with pytest.raises(DatabaseError, match="needs Redis"):
        run(opened(server))


def test_what_evicts_only_keys_that_expire_is_no_danger():
    with redis_server(**{"maxmemory-policy": "volatile-lru"}) as server:
        run(opened(server))


def test_a_user_who_may_not_ask_about_the_server_can_work(server):
    server.command("ACL", "SETUSER", "worker", "on", ">open", "~keywise:*", "+@all", "-info")
    url = server.url.replace("redis://", "redis://worker:open@")

    async def story() -> None:
        async with RedisLedger(RedisDatabase(url), "shop", PLAIN) as ledger:
            await committed(ledger, ("a", 5))

    run(story())


def test_errors_say_what_to_do_and_never_the_password(server):
    server.command("ACL", "SETUSER", "worker", "on", ">sesame", "~other:*", "+@all")
    for password, told in (("wrong-sesame", "check user and password"), ("sesame", "the right to do so")):
        url = server.url.replace("redis://", f"redis://worker:{password}@")
        with pytest.raises(DatabaseError, match=told) as caught:
            run(opened_at(url))
        assert "sesame" not in str(caught.value)
    server.command("SET", "keywise:{shop}:meta", "something else")
    with pytest.raises(DatabaseError, match="a server of its own"):
        run(opened(server))


def test_another_format_and_another_number_of_buckets_are_refused(server):
    async def story() -> None:
        async with ledger_on(server, buckets=8) as ledger:
            await committed(ledger, ("a", 5))
        async with ledger_on(server) as ledger:
            assert (await ledger.inspect("a")).mark == order_of(5), "who names none takes what there is"
        with pytest.raises(DatabaseError, match="buckets=8"):
            async with ledger_on(server, buckets=16):
                pass
        for other, advice in (("99", "upgrade keywise"), ("1", "older keywise")):
            server.command("HSET", "keywise:{shop}:meta", "format", other)
            with pytest.raises(DatabaseError, match=advice):
                async with ledger_on(server):
                    pass

    run(story())


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("redis://localhost/shop", "numbers them"),
        ("redis:///0", "names no server"),
        ("redis://localhost?buckets=many", "from 1 to"),
        ("redis://localhost?buckets=0", "from 1 to"),
        ("redis://localhost?bucket=8", "did you mean buckets"),
        ("redis://localhost?ssl_ca_certs=/x", "rediss://"),
    ],
)
def test_an_address_that_cannot_be_meant_is_refused(url, told):
    with pytest.raises(AddressError, match=told):
        connect(Address(url, "shop", {}), PLAIN)


def test_ledgers_of_one_app_share_their_connections():
    shared_things: dict = {}
    one, other = (
        connect(Address("redis://localhost:6379?buckets=8", name, shared_things), PLAIN) for name in ("a", "b")
    )
    elsewhere = connect(Address("rediss://localhost:6379/1?ssl_ca_certs=/x", "a", shared_things), PLAIN)
    assert one._server is other._server is not elsewhere._server


def test_a_claim_that_was_decided_before_a_pause_is_not_granted_after_it():
    async def story() -> None:
        async with on_shared() as ledger:
            read = await ledger._entries.read(["a"], tokens=True)
            await ledger.control_store.pause(Pause(EVERYTHING, is_pattern=True))
            seen = []

            def step(working_set, key):
                seen.append(working_set.controls.is_paused)
                if not working_set.controls.is_paused:
                    grant(working_set, key)

            await ledger._entries.run({"a": "a"}, step, read, under_controls=True)
            assert (seen, await ledger.inspect("a")) == ([False, True], None)

    run(story())


def test_what_was_decided_long_ago_is_not_written(monkeypatch):
    """A worker may have been stopped in between."""
    monkeypatch.setattr(redis_book, "READ_WITHIN_S", -1.0)
    monkeypatch.setattr(redis_book, "WAIT_S", 0.0)

    async def story() -> None:
        async with on_shared() as ledger:
            with pytest.raises(UnavailableError, match="keep changing"):
                await ledger.claim([ChangeHeader("a", (0, 1, 1))], TERMS)
            assert await ledger.inspect("a") is None

    run(story())


def test_what_was_decided_before_a_key_may_have_come_and_gone_is_decided_again():
    """Where keys are forgotten soon, one that is not there may have had a newer mark meanwhile."""

    async def story() -> None:
        async with on_shared(policy=LedgerPolicy(redelivery_s=2.0, retention_s=3.0)) as ledger:
            for seconds, times in ((4.0, 1), (6.0, 2)):
                read = await ledger._entries.read(["a"], tokens=True)
                RedisBench().move_clock([ledger], seconds)
                moments = []

                def step(working_set, key, moments=moments):
                    moments.append(working_set.now)
                    grant(working_set, key)

                await ledger._entries.run({"a": "a"}, step, read)
                assert len(moments) == times

    run(story())


def test_a_long_key_does_not_make_short_ones_larger():
    async def story() -> None:
        async with on_shared(buckets=1) as ledger:
            await committed(ledger, ("a", 1), ("k" * 500, 1))
            encodings = [
                await ledger._server.run("OBJECT", "ENCODING", ledger._scope.key(str(bucket))) for bucket in (0, 1)
            ]
            assert encodings == [b"listpack", b"hashtable"]

    run(story())


def test_nothing_can_be_written_in_a_transaction_of_it():
    async def story() -> None:
        async with on_shared() as ledger:
            with pytest.raises(SettingsError, match="holds only the ledger"):
                ledger.transaction()

    run(story())


def grant(working_set, key):
    entry, _ = redis_book.rules.grant(
        working_set.entries[key], headers((key, 1))[0], working_set.tokens[key], working_set.now, TERMS, PLAIN
    )
    working_set.set(key, entry)


@asynccontextmanager
async def on_shared(**options) -> AsyncIterator[RedisLedger]:
    async with ledger_on(shared.redis(), fresh("scope"), **options) as ledger:
        yield ledger


async def opened(server: RedisServer) -> None:
    async with ledger_on(server):
        pass


async def opened_at(url: str) -> None:
    async with RedisLedger(RedisDatabase(url), "shop", PLAIN):
        pass
