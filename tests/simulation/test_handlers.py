"""A handler of yours is simulated: whoever bears repeats, gaps and crashes passes, and nobody else does."""

import asyncio
from dataclasses import dataclass

import pytest

import keywise
from keywise import Change, Claim, Debounce, Rate, Snooze, Transaction
from keywise.testing import simulate
from mutants import MUTANTS
from simulation.handler_shop import Shop, expect_nothing


@pytest.fixture
def shop() -> Shop:
    return Shop()


# Handlers that bear it.


def test_a_plain_handler_that_writes_the_whole_state_passes(shop):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    expect_nothing(shop.simulate(handler))


def test_an_async_handler_with_a_claim_passes(shop):
    async def handler(change: Change[dict], claim: Claim) -> None:
        assert claim.key == change.key
        await asyncio.to_thread(shop.write, change)

    expect_nothing(shop.simulate(handler))


def test_a_batch_handler_passes_though_workers_die_in_the_middle_of_it(shop):
    async def patient(changes: list[Change[dict]]) -> None:
        for change in changes:
            await asyncio.wait([asyncio.ensure_future(asyncio.to_thread(shop.write, change))])

    expect_nothing(shop.simulate(patient))


def test_a_handler_that_adds_inside_the_transaction_passes():
    """Effect and commit are one step, so even what is not idempotent happens once."""
    shop = Shop(version=None)

    def handler(change: Change[dict], transaction: Transaction) -> None:
        transaction.connection.execute("update stock set pieces = pieces - 1")
        transaction.connection.execute("insert into taken values (?)", (change.key,))

    def reset(connection) -> None:
        connection.execute("create table stock (pieces)")
        connection.execute("insert into stock values (100)")
        connection.execute("create table taken (id text primary key)")

    expect_nothing(shop.simulate(handler, reset=reset, state=None))
    pieces = []
    assert shop_again(handler, reset, lambda connection: pieces.append(_pieces(connection)))
    assert set(pieces) == {97}


def _pieces(connection) -> int:
    [[pieces]] = connection.execute("select pieces from stock").fetchall()
    return pieces


def shop_again(handler, reset, state) -> bool:
    return bool(Shop(version=None).simulate(handler, reset=reset, state=state, seeds=5))


def test_a_batch_handler_with_the_transaction_passes(shop):
    async def handler(changes: list[Change[dict]], transaction: Transaction) -> None:
        rows = [(change.key, change.version) for change in changes]
        transaction.connection.executemany("insert or replace into stock values (?, ?)", rows)

    def reset(connection) -> None:
        connection.execute("create table stock (id text primary key, version)")

    expect_nothing(shop.simulate(handler, reset=reset, state=None))


def test_limits_and_snoozes_of_the_pipeline_are_kept_in_the_simulation():
    shop = Shop(debounce=Debounce("500ms", max_wait="5s"), rate=Rate(1, per="1s"))

    def handler(change: Change[dict]) -> Snooze | None:
        if not shop.log:
            shop.log.append("snoozed once")
            return Snooze("3s")
        shop.write(change)
        return None

    expect_nothing(shop.simulate(handler))


@pytest.mark.parametrize("options", [{"attempts_max": 1}, {"crashes_max": 1}, {"concurrency": 1, "lease": "6s"}])
def test_faults_never_use_up_the_tries_of_a_change(options):
    """A dead letter that the simulator itself has caused would be blamed on the handler."""
    shop = Shop(**options)

    async def handler(change: Change[dict]) -> None:
        shop.write(change)

    expect_nothing(shop.simulate(handler))


def test_what_lookup_says_is_compared_by_default(shop):
    @shop.pipeline.lookup
    def lookup(key: str) -> int | None:
        return shop.stored.get(key)

    def handler(change: Change[dict]) -> None:
        shop.write(change)

    expect_nothing(shop.simulate(handler, state=None))


def test_states_may_hold_values_of_any_class(shop):
    @dataclass
    class Row:
        version: int

    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = Row(change.version)

    expect_nothing(shop.simulate(handler))


# Handlers that do not.


def test_a_handler_that_adds_is_caught(shop):
    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = shop.stored.get(change.key, 0) + 1

    report = shop.simulate(handler)
    assert not report
    finding = report.findings[0]
    assert {one.wanted for one in finding.differences} == {"4"}
    assert "Older versions were skipped" in finding.advice or "more than once" in finding.advice
    assert any("is handed version" in line for line in finding.story), finding


def test_a_handler_that_adds_once_per_key_is_caught_when_a_worker_dies_after_it():
    shop = Shop(version=None)

    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = shop.stored.get(change.key, 0) + 1

    report = shop.simulate(handler, seeds=60)
    assert not report
    for finding in report.findings:
        assert finding.advice.startswith("The handler ran more than once for one change.")
        runs = [line for line in finding.story if "runs the handler for the change" in line]
        assert len(runs) > 1, finding
    printed = "\n".join(map(str, report.findings))
    for why in ("dies after the handler has run", "stops for", "the answer of its last call is lost"):
        assert why in printed


def test_a_handler_that_appends_is_caught(shop):
    def handler(change: Change[dict]) -> None:
        shop.log.append((change.key, change.version))

    report = shop.simulate(handler, state=lambda: list(shop.log))
    assert not report
    assert report.findings[0].differences[0].wanted.startswith("[('apple', 1), ('banana', 1)")


def test_a_handler_that_remembers_what_it_has_seen_is_caught_without_any_fault(shop):
    seen: set[str] = set()

    def handler(change: Change[dict]) -> None:
        if change.key not in seen:
            seen.add(change.key)
            shop.write(change)

    [finding] = shop.simulate(handler).findings
    assert finding.seed is None
    assert "another state in a second run" in finding.what
    assert "keeps state between calls" in finding.advice


@pytest.mark.parametrize("remembers", ["the first value", "what it has seen", "what is left to write"])
def test_memory_of_a_worker_is_caught_if_each_worker_has_an_app_of_its_own(remembers):
    """Its own cache makes a worker write an older version over a newer one, which another worker has written."""
    stored: dict[str, int] = {}

    def make() -> keywise.App:
        shop = Shop()
        cache: dict[str, int] = {}

        @shop.pipeline.apply
        def handler(change: Change[dict]) -> None:
            if remembers == "the first value":
                stored[change.key] = cache.setdefault(change.key, change.version)
            elif remembers == "what it has seen":
                if change.version not in cache.values():
                    stored[change.key] = change.version
                cache[change.key] = change.version
            else:
                cache[change.key] = change.version
                if len(cache) > 1:
                    stored.update(cache)
                    cache.clear()

        return shop.app

    report = simulate(make, state=lambda: dict(stored), reset=stored.clear, seeds=40)
    assert not report
    assert report.findings[0].seed is not None


def test_a_handler_that_cannot_be_repeated_is_caught_by_its_dead_letter(shop):
    def handler(change: Change[dict]) -> None:
        if (change.key, change.version) in shop.stored:
            raise ValueError("already there")
        shop.stored[change.key, change.version] = 1

    report = shop.simulate(handler, state=lambda: None)
    assert not report
    finding = report.findings[0]
    assert "became a dead letter: ValueError: already there" in finding.what
    assert any("it raises ValueError: already there" in line for line in finding.story)


def test_a_late_write_is_caught_if_it_is_asked_for_and_a_store_that_compares_tokens_bears_it(shop):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    report = shop.simulate(handler, zombies=True, seeds=range(40, 90))
    assert not report
    assert "long after its claim had expired" in report.findings[0].advice
    fenced = Shop()

    def fencing(change: Change[dict], claim: Claim) -> None:
        token, _ = fenced.stored.get(change.key, (0, 0))
        if claim.token >= token:
            fenced.stored[change.key] = (claim.token, change.version)

    state = {"state": lambda: {key: version for key, (_, version) in fenced.stored.items()}}
    report = fenced.simulate(fencing, zombies=True, seeds=range(40, 90), **state)
    assert report, report


@pytest.mark.parametrize("name", ["looks first and takes later", "older changes do not wait for an unknown write"])
def test_a_broken_consumer_is_blamed_and_not_the_handler(shop, name):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    [mutant] = [one for one in MUTANTS if one.name == name]
    with mutant.alive():
        report = shop.simulate(handler)
    assert not report
    assert any("keywise itself broke a promise" in finding.what for finding in report.findings), report
