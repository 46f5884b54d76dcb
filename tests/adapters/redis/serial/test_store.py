"""Turns in Redis: who is woken, what a loss of the server means, and what goes on with a full memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

import keywise
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.serial import backend as redis
from keywise.adapters.redis.serial.backend import RedisTurns
from keywise.adapters.redis.serial.store import NONCE_BITS, token_of, token_text
from keywise.core.errors import DatabaseError, UnansweredError, UnavailableError
from keywise.core.events import SessionLost
from keywise.core.serial.contract import Ending, Mode, Switch, TurnPolicy
from keywise.testing.conformance.benches.redis import move_clock
from keywise.testing.conformance.serial.ordering import asked, done
from running import run
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

POLICY = TurnPolicy(lease_s=60.0)
SOON_S = 5.0


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of its own, which may lose what it likes."""
    with redis_server() as server:
        yield server


@asynccontextmanager
async def two_owners(url: str) -> AsyncIterator[tuple[RedisTurns, RedisTurns, RedisDatabase]]:
    database = RedisDatabase(url)
    async with (
        RedisTurns(database, "accept", "w1", POLICY) as one,
        RedisTurns(database, "accept", "w2", POLICY) as other,
    ):
        yield one, other, database


async def reached(turns: RedisTurns) -> None:
    """Ask until the server answers again."""
    while True:
        try:
            await turns.operator.now()
        except UnavailableError:
            continue
        return


# News.


def test_news_come_long_before_anybody_looks(server, monkeypatch):
    """A key that is free, a reply to a request that somebody else runs, a switch; also after the connection was cut."""
    monkeypatch.setattr(redis, "POLL_S", 60.0)

    async def woken(turns: RedisTurns, act) -> None:
        await turns.wait(0.05)
        waiting = asyncio.create_task(turns.wait(60.0))
        await act()
        await asyncio.wait_for(waiting, SOON_S)

    async def check() -> None:
        async with two_owners(server.url) as (one, other, _):
            await one.ask([asked("1", runner="w1")])
            await other.ask([asked("1", runner="w2")])
            [turn] = await one.take(10)
            await woken(other, lambda: one.answer([done(turn)]))
            assert list(await other.replies(["1"])) == ["1"]
            await one.ask([asked("2", runner="w1")])
            await other.ask([asked("3", runner="w2")])
            [turn] = await one.take(10)
            await woken(other, lambda: one.answer([done(turn)]))
            assert [turn.request.id for turn in await other.take(10)] == ["3"]
            server.command("CLIENT", "KILL", "TYPE", "pubsub")
            # It rings when it hears again.
            await asyncio.wait_for(other.wait(60.0), SOON_S)
            switch = Switch(keys="a", mode=Mode.OBSERVE)
            await woken(other, lambda: one.operator.switch(switch))

    run(check())


def test_who_leaves_while_it_begins_to_listen_leaves(server):
    """However far its connection has come: the client library swallows a cancellation now and then."""

    async def check() -> None:
        async with RedisDatabase(server.url) as database:
            for passes in (*range(40), *range(40)):
                async with RedisTurns(database, "accept", "w1", POLICY) as turns:
                    for _ in range(passes):
                        await turns.wait(0.0)

    run(check())


def test_who_asks_and_takes_in_one_call_rings_nobody(server):
    """Others hear of what they may wait for, and of nothing else: it is a call for each of them."""

    async def check() -> None:
        async with two_owners(server.url) as (one, _, database):
            while not await database.run("PUBLISH", f"{one._store.prefix}news:w2", ""):
                pass
            before = published(server)
            answered = await one.answer([], 10, 1, [asked("1", runner="w1")])
            await one.answer([done(turn) for turn in answered.turns])
            assert published(server) == before
            await one.ask([asked("2", runner="w2")])
            assert published(server) == before + 1

    run(check())


def published(server: RedisServer) -> int:
    """How often anybody was told anything."""
    return int(server.command("INFO", "commandstats").partition("cmdstat_publish:calls=")[2].partition(",")[0])


# Losses.


def test_after_a_loss_nobody_has_a_turn_until_those_who_had_one_must_know(server):
    """Their turns are refused, and the same id is run again, since nothing is known of it any more."""

    async def check() -> None:
        async with two_owners(server.url) as (one, other, database):
            await one.ask([asked("1"), asked("2")])
            [turn] = await one.take(10)
            server.lose()
            server.start()
            await reached(other)
            await other.ask([asked("1")])
            assert await other.take(10) == [], "the other one may still run it"
            assert await one.renew([turn.token]) == [turn.token], "it must stop"
            assert (await one.answer([done(turn)])).refused == ["1"]
            assert (one.sessions_lost, other.sessions_lost) == (1, 1)
            move_clock(database, POLICY.lease_s + 1.0)
            [again] = await other.take(10)
            assert (again.request.id, again.place) == ("1", 1)
            assert again.token > turn.token
            assert (await other.answer([done(again)])).refused == []
            assert (await one.replies(["1"]))["1"].outcome is Ending.DONE
            assert (one.sessions_lost, other.sessions_lost) == (1, 1), "it is noted once"

    run(check())


def test_a_loss_breaks_off_what_runs_and_is_told(server):
    """Nobody knows its request any more, so that its caller gets no answer; calls go on after a lease."""

    async def check() -> None:
        app, seen = keywise.App(server.url), []
        begun, broken_off = asyncio.Event(), asyncio.Event()
        app.observers.append(seen.append)

        @app.serial("accept", key=lambda request: "a", timeout="20s", lease="2s", margin="500ms")
        async def accept(claim: keywise.Claim, request: str) -> str:
            begun.set()
            if request == "long":
                try:
                    await asyncio.Event().wait()
                finally:
                    broken_off.set()
            return f"yes to {request}"

        async with app:
            first = asyncio.create_task(accept("long", timeout=5.0))
            await begun.wait()
            server.lose()
            server.start()
            await asyncio.wait_for(broken_off.wait(), SOON_S)
            with pytest.raises(UnansweredError):
                await first
            assert await accept("short") == "yes to short"
        assert [event.losses for event in seen if isinstance(event, SessionLost)] == [1]

    run(check())


def test_a_server_that_goes_back_a_little_is_found_out(server):
    """Though others have called meanwhile: each knows the number of its own last call."""

    async def check() -> None:
        async with two_owners(server.url) as (one, other, database):
            await one.ask([asked("1")])
            server.stop()
            before = server.read_file()
            server.start()
            await reached(one)
            [turn] = await one.take(10)
            server.stop()
            server.write_file(before)
            server.start()
            await reached(other)
            for _ in range(9):
                await other.replies(["1"])
            assert await one.renew([turn.token]) == [turn.token]
            assert one.sessions_lost == 1
            assert await other.take(10) == [], "it is quiet for a lease"
            move_clock(database, POLICY.lease_s + 1.0)
            [again] = await other.take(10)
            assert again.token != turn.token

    run(check())


def test_a_restart_that_loses_nothing_is_no_loss(server):
    async def check() -> None:
        async with two_owners(server.url) as (one, other, _):
            await one.ask([asked("1"), asked("2")])
            [turn] = await one.take(10)
            server.stop()
            server.start()
            await reached(one)
            assert (await one.answer([done(turn)])).refused == []
            assert [turn.request.id for turn in await other.take(10)] == ["2"]
            assert (one.sessions_lost, other.sessions_lost) == (0, 0)

    run(check())


def test_with_a_full_memory_what_runs_is_answered_and_nothing_new_is_taken_in(server):
    async def check() -> None:
        async with two_owners(server.url) as (one, _, _):
            await one.ask([asked("1"), asked("2")])
            [turn] = await one.take(1)
            server.command("CONFIG", "SET", "maxmemory", "1")
            with pytest.raises(UnavailableError):
                await one.answer([done(turn)], 1, 1, [asked("3")])
            assert (await one.replies(["1"]))["1"].outcome is Ending.DONE
            [turn] = await one.take(1)
            assert (await one.answer([done(turn)])).refused == []
            server.command("CONFIG", "SET", "maxmemory", "0")
            assert await one.ask([asked("3")]) == [None]

    run(check())


def test_what_a_newer_version_wrote_is_refused(server):
    async def check() -> None:
        async with two_owners(server.url) as (one, _, database):
            await database.run("HSET", f"{one._store.prefix}meta", "format", "2")
            with pytest.raises(DatabaseError, match="upgrade keywise"):
                async with RedisTurns(database, "accept", "w3", POLICY):
                    pass

    run(check())


def test_tokens_of_64_bits_come_back_as_they_were():
    for token in (0, 1, 1 << NONCE_BITS, (1 << 62) + 3, (1 << 63) - 1):
        assert token_of(token_text(token).encode()) == token
