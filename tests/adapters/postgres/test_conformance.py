"""The plugs on Postgres keep the promises of their protocols, on a real server."""

from contextlib import suppress

import pytest

from adapters.postgres.benches import LEDGERS, ORIGINS, SINKS, SOURCES
from keywise.testing.conformance import UncheckedError, ledger_promises
from keywise.testing.conformance.origins import CONSISTENT_PROMISES, ORIGIN_PROMISES
from keywise.testing.conformance.sinks import ATOMIC_PROMISES, READING_PROMISES
from keywise.testing.conformance.sources import SOURCE_PROMISES, VISIBILITY_PROMISES
from keywise.testing.conformance.targets import RENAMING_PROMISES, TARGET_PROMISES
from keywise.testing.conformance.transactional_queues import TRANSACTIONAL_QUEUE_PROMISES
from running import run

pytestmark = pytest.mark.server("postgres")

# Said here and not asked from the plugs, so that nothing is started while tests are collected.
TRANSACTIONAL_PROMISES = [*SOURCE_PROMISES, *VISIBILITY_PROMISES, *TRANSACTIONAL_QUEUE_PROMISES]
TABLE_PROMISES = [*ATOMIC_PROMISES, *READING_PROMISES, *TARGET_PROMISES, *RENAMING_PROMISES]


def pairs(files: dict, promises: list) -> list:
    return [
        pytest.param(make, promise, id=f"{name}-{promise.name}")
        for makes in files.values()
        for name, make in makes.items()
        for promise in promises
    ]


@pytest.mark.parametrize(("make", "promise"), pairs(SOURCES, TRANSACTIONAL_PROMISES))
def test_a_source_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(LEDGERS, ledger_promises()))
def test_a_ledger_keeps_its_promises(make, promise):
    run(promise(make), limit_s=110)


@pytest.mark.parametrize(("make", "promise"), pairs(SINKS, TABLE_PROMISES))
def test_a_sink_keeps_its_promises(make, promise):
    run(promise(make))


@pytest.mark.parametrize(("make", "promise"), pairs(ORIGINS, [*ORIGIN_PROMISES, *CONSISTENT_PROMISES]))
def test_an_origin_keeps_its_promises(make, promise):
    with suppress(UncheckedError):
        run(promise(make))
