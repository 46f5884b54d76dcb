"""What a Redis server has lost is noted once and for all, whatever happens to whoever finds it."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress

import msgspec
import pytest

from adapters.redis.benches import fresh
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger import scope as redis_scope
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.adapters.redis.ledger.progress_file import Progress, ProgressFile
from keywise.adapters.redis.ledger.working_set import TOKEN_NONCE_BITS
from keywise.core.change import ChangeHeader, order_of
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.entry import Commit, Entry, LeaseTerms, LedgerPolicy
from keywise.core.errors import DatabaseError, UnavailableError
from running import run
from servers.redis import RedisServer, redis_server

pytestmark = pytest.mark.server("redis")

TERMS = LeaseTerms("w1", 60.0)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One of its own, which may lose what it likes."""
    with redis_server() as server:
        yield server


@asynccontextmanager
async def ledger_on(server: RedisServer, name: str = "shop", **options) -> AsyncIterator[RedisLedger]:
    async with RedisLedger(RedisDatabase(server.url), name, LedgerPolicy(intents=True), **options) as ledger:
        yield ledger


async def committed(ledger: RedisLedger, key: str, version: int) -> None:
    [claim] = (await ledger.claim([ChangeHeader(key, order_of(version))], TERMS)).granted
    assert await ledger.commit([Commit(claim)]) == []


async def reached(ledger: RedisLedger) -> None:
    """Ask until the server answers again."""
    while True:
        try:
            await ledger.counts()
        except UnavailableError:
            continue
        return


async def is_due(ledger: RedisLedger) -> bool:
    return (await ledger.control_store.controls()).resync_at > 0


@pytest.mark.parametrize("end", [ConnectionResetError, asyncio.CancelledError], ids=["cut off", "cancelled"])
def test_a_loss_is_noted_though_whoever_finds_it_does_not_come_to_its_end(server, end):
    """After however many of the commands that it takes."""

    async def story() -> None:
        for commands in range(8):
            async with ledger_on(server, fresh("scope")) as ledger:
                await committed(ledger, "a", 5)
                server.command("FLUSHALL")
                asked = await _ended_after(ledger, commands, end)
                await committed(ledger, "a", 4)
                assert await is_due(ledger)
                assert ledger.losses == 1, "it is told once"
        assert asked < commands, "all commands were tried"

    run(story())


async def _ended_after(ledger: RedisLedger, commands: int, end: type[BaseException]) -> int:
    """Let a call end after so many commands, the last of which arrives; how many there were."""
    real, asked = ledger._server._ask, 0

    async def ask(*command):
        nonlocal asked
        asked += 1
        answer = await real(*command)
        if asked > commands:
            raise end
        return answer

    ledger._server._ask = ask
    with suppress(UnavailableError, asyncio.CancelledError):
        await ledger.counts()
    ledger._server._ask = real
    return asked


def test_tokens_go_on_above_those_from_before_a_loss(server):
    """Rule 9: a holder from before must never have the token of one from after it, whatever the nonces are."""

    async def story() -> None:
        before, after = [], []
        async with ledger_on(server) as ledger, ledger_on(server) as other:
            for number, tokens in enumerate((before, after)):
                for key in "abc":
                    some = ledger if key == "b" else other
                    [claim] = (await some.claim([ChangeHeader(f"{key}{number}", order_of(1))], TERMS)).granted
                    tokens.append(claim.token >> TOKEN_NONCE_BITS)
                server.command("FLUSHALL")
        assert before + after == sorted({*before, *after})

    run(story())


def test_many_who_find_a_loss_at_once_tell_it_once(server):
    async def story() -> None:
        async with ledger_on(server) as ledger:
            await committed(ledger, "a", 5)
            server.command("FLUSHALL")
            await asyncio.gather(*(ledger.counts() for _ in range(8)))
            assert (ledger.losses, await is_due(ledger)) == (1, True)

    run(story())


def test_what_was_set_before_a_loss_was_noted_stays_set(server, monkeypatch):
    async def story() -> None:
        async with ledger_on(server) as ledger, ledger_on(server) as other:
            await committed(ledger, "a", 5)
            server.command("FLUSHALL")
            noted = ledger._scope.on_loss
            await other.counts()

            def slow(controls: bytes, now: float) -> bytes:
                ledger._scope.on_loss = noted
                server.command("SET", "keywise:{shop}:controls", '{"era":3}')
                return noted(controls, now)

            ledger._scope.on_loss = slow
            await ledger.counts()
            assert (await ledger.control_store.controls()).era == 3
            assert await is_due(ledger)
            server.command("FLUSHALL")
            monkeypatch.setattr(redis_scope, "NOTES_MAX", 0)
            with pytest.raises(UnavailableError, match="others keep changing"):
                await ledger.counts()

    run(story())


@pytest.mark.parametrize("what", ["pause", "era"])
def test_a_pause_and_an_era_that_are_lost_are_found_out(server, what):
    """By whoever set it, and by whoever has seen it."""

    async def story() -> None:
        async with ledger_on(server) as ledger, ledger_on(server) as other:
            await committed(ledger, "a", 5)
            before = server.read_file()
            if what == "pause":
                await ledger.control_store.pause(Pause(EVERYTHING, is_pattern=True))
            else:
                assert await ledger.control_store.raise_era() == 1
            await other.inspect("a")
            server.stop()
            server.write_file(before)
            server.start()
            for one in (other, ledger):
                await reached(one)
                assert one.losses == 1
            assert await is_due(ledger)

    run(story())


def test_a_quiet_worker_is_not_taken_for_one_whose_writes_are_gone(server):
    """So many wrote after it that its number is kept no more."""

    async def story() -> None:
        async with ledger_on(server) as quiet:
            await committed(quiet, "a", 5)
            crowd = [word for number in range(5000) for word in ("3", f"worker{number}")]
            server.command("ZADD", "keywise:{shop}:workers", *crowd)
            async with ledger_on(server):
                assert int(server.command("ZCARD", "keywise:{shop}:workers")[1:]) == redis_scope.WORKERS_MAX
            await quiet.counts()
            assert (quiet.losses, await is_due(quiet)) == (0, False)
            await committed(quiet, "c", 5)
            server.command("DEL", "keywise:{shop}:workers")
            await quiet.counts()
            assert quiet.losses == 1, "what is lost after that is found out"

    run(story())


def test_what_was_to_be_written_elsewhere_is_not_written_after_a_loss(server):
    """Keys may lie in other places of a ledger that was made anew."""

    async def story() -> None:
        async with ledger_on(server, buckets=7):
            pass
        async with ledger_on(server) as ledger:
            await committed(ledger, "a", 5)
            read = await ledger._entries.read(["key"])
            server.command("FLUSHALL")
            async with ledger_on(server) as other:
                await committed(other, "key", 9)
            wrong = Entry(order_of(8), False, read.now)

            def write(working_set, key):
                working_set.set(key, working_set.entries[key] or wrong)

            with pytest.raises(UnavailableError, match="buckets"):
                await ledger._entries.run({"key": "key"}, write, read)
            assert (await ledger.inspect("key")).mark == order_of(9)
            assert (ledger.losses, await is_due(ledger)) == (1, True)
            await ledger._entries.run({"key": "key"}, write, read)
            assert (await ledger.inspect("key")).mark == order_of(9)

    run(story())


@pytest.mark.parametrize("loss", ["everything", "what came after a copy of its file"])
def test_what_was_lost_while_no_worker_ran_is_found_at_the_next_start(server, tmp_path, loss):
    """Nobody is left who knows, so it is noted in a file outside of the server."""
    folder = str(tmp_path / "state")

    async def story() -> None:
        async with ledger_on(server, witness=folder) as ledger:
            await committed(ledger, "a", 5)
            before = server.read_file()
            await committed(ledger, "a", 6)
        if loss == "everything":
            server.command("FLUSHALL")
        else:
            server.stop()
            server.write_file(before)
            server.start()
        async with ledger_on(server, witness=folder) as ledger:
            assert (ledger.losses, await is_due(ledger)) == (1, True)
            await committed(ledger, "a", 6)
        async with ledger_on(server, witness=folder) as ledger:
            assert ledger.losses == 0, "it is found once"
            assert await is_due(ledger), "until an operator takes it back"

    run(story())


def test_a_ledger_that_lost_nothing_is_not_suspected_at_the_next_start(server, tmp_path):
    async def story() -> None:
        for name in ("shop", "other shop/é"):
            for version in (1, 2, 3):
                async with ledger_on(server, name, witness=str(tmp_path)) as ledger, ledger_on(server, name) as other:
                    await committed(ledger, "a", 2 * version)
                    await committed(other, "a", 2 * version + 1)
                    assert (ledger.losses, await is_due(ledger)) == (0, False)
                server.restart()

    run(story())


def test_a_witness_that_cannot_be_used_is_named_with_what_to_do(server, tmp_path):
    (tmp_path / "file").write_text("")

    async def story() -> None:
        with pytest.raises(DatabaseError, match=r"cannot be (read|written).*name a"):
            async with ledger_on(server, witness=str(tmp_path / "file")):
                pass
        async with ledger_on(server, witness=str(tmp_path)) as ledger:
            await committed(ledger, "a", 1)
        [file] = tmp_path.glob("*.witness")
        file.write_text("no witness")
        with pytest.raises(DatabaseError, match=r"cannot be read.*remove it"):
            async with ledger_on(server, witness=str(tmp_path)):
                pass

    run(story())


def test_a_write_of_another_worker_during_the_start_is_not_a_loss(server, tmp_path):
    """The file may run ahead of what the server answered before, and keeps the higher number."""

    async def story() -> None:
        async with ledger_on(server, witness=str(tmp_path)) as other:
            await committed(other, "a", 1)
            starting = RedisLedger(RedisDatabase(server.url), "shop", LedgerPolicy(), witness=str(tmp_path))
            real = starting._server._ask

            async def ask(*command):
                answer = await real(*command)
                if "shop" in command:
                    starting._server._ask = real
                    await committed(other, "a", 2)
                    other._scope.close()
                return answer

            starting._server._ask = ask
            async with starting:
                assert (starting.losses, await is_due(other)) == (0, False)
                [file] = tmp_path.iterdir()
                assert msgspec.json.decode(file.read_bytes())["seq"] == other._scope._seen

    run(story())


def test_workers_of_one_process_write_the_file_at_once_and_leave_nothing_else(tmp_path):
    def write() -> None:
        for seq in range(300):
            ProgressFile(str(tmp_path), "server", "shop").open(Progress("nonce", seq))

    with ThreadPoolExecutor() as threads:
        for writing in [threads.submit(write) for _ in range(4)]:
            writing.result()
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path):
    progress_file = ProgressFile(str(tmp_path), "server", "shop")
    progress_file.open(Progress("nonce", 1))
    [file] = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    with pytest.raises(OSError):
        progress_file._write(Progress("nonce", 2))
    assert list(tmp_path.iterdir()) == [file]
