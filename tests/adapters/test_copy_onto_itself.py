"""One ledger under two spellings of its address: a copy that is to replace it with itself is refused."""

from functools import partial

import pytest
from msgspec.structs import replace

from adapters.postgres.benches import fresh
from keywise.adapters.postgres.ledger.ledger import PostgresLedger
from keywise.adapters.redis.database import RedisDatabase
from keywise.adapters.redis.ledger.ledger import RedisLedger
from keywise.core.controls import EVERYTHING, Pause
from keywise.core.errors import AdminError
from keywise.operate.admin import AuditNote
from keywise.operate.copy_ledger import LedgerCopy, LedgerHandle, TargetState
from keywise.testing.conformance.benches import bench_of
from keywise.testing.conformance.benches.postgres import PostgresBenchDatabase
from keywise.testing.conformance.claims import PLAIN, LedgerBench
from keywise.testing.conformance.dumps import filled, joined, pages_of
from running import run
from servers import shared

KINDS = {"postgres": (PostgresBenchDatabase, PostgresLedger), "redis": (RedisDatabase, RedisLedger)}


@pytest.mark.parametrize("server", [pytest.param(name, marks=pytest.mark.server(name)) for name in KINDS])
def test_a_ledger_is_not_replaced_by_itself_under_another_spelling_of_its_host(server):
    """As after a comparison during which something was written."""
    url, scope = getattr(shared, server)().url, fresh("same")

    async def main() -> None:
        database, ledger = KINDS[server]
        databases = [database(each) for each in (url, url.replace("127.0.0.1", "localhost"))]
        async with ledger(databases[0], scope, PLAIN) as one, ledger(databases[1], scope, PLAIN) as other:
            advance = partial(bench_of(server).move_clock, (one, other))
            await filled(LedgerBench(ledger=one, another=one, advance=advance))
            await one.control_store.pause(Pause(EVERYTHING, True))
            before, controls = joined(await pages_of(one.transfer, 100)), await one.control_store.controls()
            move = LedgerCopy(scope, LedgerHandle("here", one), LedgerHandle("there", other), lambda what, done: None)
            plan = await move.plan()
            assert plan.found is TargetState.SAME
            with pytest.raises(AdminError, match="here and there are the same ledger"):
                await move.run(replace(plan, found=TargetState.OTHER), AuditNote("ada"))
            assert joined(await pages_of(one.transfer, 100)) == before
            assert await other.control_store.controls() == controls

    run(main())
