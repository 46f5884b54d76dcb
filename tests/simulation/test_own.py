"""A handler of yours is simulated: whoever bears repeats, gaps and crashes passes, and nobody else does."""

import asyncio
import random
from dataclasses import dataclass

import pytest

import keywise
from keywise import Change, Claim, Debounce, PermanentError, Put, Rate, Retry, Snooze, Transaction
from keywise.errors import SettingsError
from keywise.testing import MUTANTS, simulate

SEEDS = 30


class Shop:
    """A store in memory, an app whose handlers write to it, and how to simulate them."""

    def __init__(self, **options) -> None:
        self.stored: dict = {}
        self.log: list = []
        self.app = keywise.App("memory://")
        options = {"key": "id", "version": "v", "deleted": {"state": ["gone"]}} | options
        self.pipeline = self.app.pipeline("stock", **options)

    def reset(self) -> None:
        self.stored.clear()
        self.log.clear()

    def simulate(self, handler, **options):
        self.pipeline.apply(handler)
        options = {"state": lambda: dict(self.stored), "reset": self.reset, "seeds": SEEDS} | options
        return simulate(self.app, **options)

    def write(self, change: Change) -> None:
        if change.deleted:
            self.stored.pop(change.key, None)
        else:
            self.stored[change.key] = change.version


@pytest.fixture
def shop() -> Shop:
    return Shop()


def expect_nothing(report) -> None:
    assert report, report
    assert report.seeds == SEEDS
    assert report.calls > 0
    assert sum(report.faults.values()) > 0


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
    told = "\n".join(map(str, report.findings))
    for why in ("dies after the handler has run", "stops for", "the answer of its last call is lost"):
        assert why in told


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
    assert "something else the second time" in finding.what
    assert "remembers something between calls" in finding.advice


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
    assert "long after its claim had ended" in report.findings[0].advice
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


# Without any fault.


def test_a_handler_that_raises_without_any_fault_is_told_first(shop):
    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = change.value["price"]

    report = shop.simulate(handler)
    assert report.seeds == 0
    [finding] = report.findings
    assert finding.what == "the handler raises for version 1 of 'apple': KeyError: 'price'"
    assert str(report).splitlines()[-1].startswith("Without any fault: the handler raises")


def test_a_handler_that_uses_the_network_is_told_what_to_do(shop):
    async def handler(change: Change[dict]) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", 9)
        writer.close()

    [finding] = shop.simulate(handler).findings
    assert "let it write to a store in memory" in finding.advice


def test_messages_that_are_refused_for_good_are_dead_letters_in_every_run(shop):
    def handler(change: Change[dict]) -> None:
        if change.key == "banana":
            raise PermanentError("no bananas")
        shop.write(change)

    report = shop.simulate(handler)
    expect_nothing(report)
    assert report.set_aside[0] == "'banana' version 1: PermanentError: no bananas"
    assert "set aside also without any fault: 'banana' version 1" in str(report)


def test_a_handler_that_ends_its_process_is_a_dead_letter_too(shop):
    def handler(change: Change[dict]) -> None:
        if change.key == "banana":
            raise SystemExit(1)
        shop.write(change)

    report = shop.simulate(handler, seeds=2)
    assert report, report
    assert "workers died alone with this change" in report.set_aside[0]


# Seeds and samples.


def test_a_seed_tells_the_same_story_each_time():
    def told() -> str:
        shop = Shop(version=None)

        async def handler(change: Change[dict]) -> None:
            shop.stored[change.key] = shop.stored.get(change.key, 0) + 1

        return str(shop.simulate(handler, seeds=[1, 2, 3, 4, 5]))

    first = told()
    random.random()
    assert told() == first
    assert "Seed" in first


def test_one_seed_alone_tells_what_it_told_among_others():
    shop = Shop(version=None)

    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = shop.stored.get(change.key, 0) + 1

    among = {one.seed: one for one in shop.simulate(handler).findings}
    seed = min(among)
    again = Shop(version=None)

    def same(change: Change[dict]) -> None:
        again.stored[change.key] = again.stored.get(change.key, 0) + 1

    assert again.simulate(same, seeds=[seed]).findings == [among[seed]]


def test_messages_come_in_the_order_of_their_versions_without_faults(shop):
    calls = []

    def handler(change: Change[dict]) -> None:
        calls.append((change.key, change.version))
        shop.write(change)

    samples = [{"id": "a", "v": 3}, {"id": "b", "v": 1}, {"id": "a", "v": 1}, {"id": "a", "v": 2}, {"id": "a", "v": 2}]
    report = shop.simulate(handler, messages=lambda: samples, seeds=0)
    assert report.messages == 5
    assert calls[:4] == [("a", 1), ("b", 1), ("a", 2), ("a", 3)]


@pytest.mark.parametrize(
    ("messages", "told"),
    [
        ([], "there is no message"),
        ([{"id": "a", "v": 1}] * 201, "201 messages are too many"),
        ([{"id": "a", "v": 1}, {"id": "a", "v": 1, "name": "b"}], "two messages say different things of key 'a'"),
        ([{"id": "a", "v": 1}, {"v": 2}], "message 2 cannot be read by pipeline 'stock'"),
    ],
)
def test_samples_that_prove_nothing_are_refused(shop, messages, told):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    with pytest.raises(SettingsError, match=told):
        shop.simulate(handler, messages=messages)


def test_what_is_missing_is_told(shop):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    for options, told in (
        ({"state": None}, "give state="),
        ({"reset": None}, "give reset="),
        ({"pipeline": "nobody"}, "no pipeline is called 'nobody'"),
        ({"state": lambda connection: 1}, "asks for no Transaction"),
    ):
        with pytest.raises(SettingsError, match=told):
            Shop().simulate(handler, **options)
    with pytest.raises(SettingsError, match="this app has none"):
        simulate(shop.app)
    shop.pipeline.sink("memory://")
    with pytest.raises(SettingsError, match="has no handler to simulate"):
        simulate(shop.app, pipeline="stock")


def test_a_read_function_needs_samples():
    app = keywise.App("memory://")
    stored = {}
    stock = app.pipeline("stock", read=lambda body: Put(body["id"], body["v"]), retry=Retry(attempts=2))

    @stock.apply
    def handler(change: Change[dict]) -> None:
        stored[change.key] = change.version

    options = {"state": lambda: dict(stored), "reset": stored.clear, "seeds": 10}
    with pytest.raises(SettingsError, match="reads its messages with a function"):
        simulate(app, **options)
    assert simulate(app, messages=[{"id": "a", "v": 1}, {"id": "a", "v": 2}], **options)


def test_simulate_is_no_coroutine(shop):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    async def inside() -> None:
        shop.simulate(handler)

    with pytest.raises(SettingsError, match="call it from a plain function"):
        asyncio.run(inside())
