"""`keywise ledger copy` from SQLite to a real Postgres and back, also when it is killed or the server is cut off."""

import asyncpg
import pytest

from adapters.postgres.benches import fresh
from cli.commands.copy_shop import HOSTILE, OLD, Mover
from keywise.core.key_encoding import encoded
from running import run, scaled
from servers import shared

pytestmark = pytest.mark.server("postgres")

PAUSE = ("pause", "--all", "--wait", "--yes", "--pipeline", "pages")
RESUME = ("resume", "--all", "--yes", "--pipeline", "pages")


@pytest.fixture
def shop(tmp_path) -> Mover:
    return Mover(tmp_path)


@pytest.fixture
def url() -> str:
    """A new, empty database."""
    return shared.postgres().create_database(fresh("database"))


def fetched(url: str, statement: str) -> list:
    async def main() -> list:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetch(statement)
        finally:
            await connection.close()

    return run(main())


def keys_in(url: str) -> int:
    [[there]] = fetched(url, "select to_regclass('keywise_marks') is not null")
    return fetched(url, "select count(*) from keywise_marks")[0][0] if there else 0


def test_a_pipeline_moves_to_postgres_and_back_and_newest_wins_everywhere(shop, url):
    shop.send(*({"id": key, "v": 5} for key in HOSTILE), {"id": "gone", "v": 5, "state": "gone"})
    shop.send({"id": "bad", "v": 1, "bad": True})
    shop.at(OLD, "run", "--until-empty")
    back, keys = "sqlite:///back.db", [*HOSTILE, "gone"]
    for version, source, target in ((6, OLD, url), (7, url, back)):
        before = len(shop.log())
        shop.at(source, *PAUSE)
        assert "both sides agree" in shop.copy(source, target).out
        shop.send(*({"id": key, "v": v} for key in keys for v in (version - 1, version, version - 2)))
        shop.at(target, *RESUME)
        shop.at(target, "run", "--until-empty")
        assert sorted(shop.log()[before:]) == sorted((key, version) for key in keys)
    [letter] = shop.at(back, "dead", "list", "--json").json["letters"]
    assert letter["key"] == "bad"


@pytest.mark.parametrize("least", [1, 20_000])
def test_a_copy_that_is_killed_is_begun_anew_and_is_right_then(shop, url, least):
    shop.fill(20_000)
    shop.kill_in_the_middle(url, lambda: keys_in(url), least)
    assert "keys like '**'" in shop.at(url, "status").out
    assert "copied pages: 20,000 keys" in shop.copy(OLD, url).out
    [[keys, tombstones, version]] = fetched(
        url, "select count(*), count(*) filter (where deleted), sum(version) from keywise_marks"
    )
    assert (keys, tombstones, version) == (20_000, 2_858, sum(range(20_000)))
    assert "nothing to do" in shop.copy(OLD, url).out


def test_a_server_that_cuts_a_copy_off_is_told_and_the_next_try_works(shop, url):
    """The copy waits in the middle, for a key that another transaction has written, until it is cut off there."""
    shop.fill(20_000)
    shop.at(url, "status")  # Makes the tables, and a scope of the pipeline.

    async def cut_off() -> str:
        other, watcher = await asyncpg.connect(url), await asyncpg.connect(url)
        async with other.transaction():
            assert await other.execute(WRITE_KEY, encoded("k010000")) == "INSERT 0 1"
            copying = shop.start("ledger", "copy", OLD, url)
            while not await watcher.fetch(CUT_OFF_WAITING):
                assert copying.poll() is None, copying.communicate()
            _, err = copying.communicate(timeout=scaled(60))
            assert copying.returncode == 1, err
            await other.execute("delete from keywise_marks where key = $1", encoded("k010000"))
        await other.close()
        await watcher.close()
        return err

    assert run(cut_off()).endswith("nothing is lost, try again\n")
    assert 0 < keys_in(url) < 20_000
    assert "copied pages: 20,000 keys" in shop.copy(OLD, url).out


WRITE_KEY = (
    "insert into keywise_marks (scope, key, updated_at) select id, $1, 0 from keywise_scopes where name = 'pages'"
)
CUT_OFF_WAITING = """
select pg_terminate_backend(pid) from pg_stat_activity
where application_name = 'keywise' and datname = current_database() and wait_event_type = 'Lock'
    and query like '%keywise_marks%'
"""
