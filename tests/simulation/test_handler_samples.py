"""What is reported without any fault, what a seed repeats, and which samples prove nothing."""

import asyncio
import random

import pytest

import keywise
from causes import said
from keywise import Change, PermanentError, Put, Retry
from keywise.core.errors import SettingsError
from keywise.testing import simulate
from simulation.handler_shop import Shop, expect_nothing


@pytest.fixture
def shop() -> Shop:
    return Shop()


# Without any fault.


def test_a_handler_that_raises_without_any_fault_is_reported_first(shop):
    def handler(change: Change[dict]) -> None:
        shop.stored[change.key] = change.value["price"]

    report = shop.simulate(handler)
    assert report.seeds == 0
    [finding] = report.findings
    assert said(finding.what) == "the handler raises for version 1 of 'apple': KeyError: 'price'"
    assert str(report).splitlines()[-1].startswith("Without any fault: the handler raises")


def test_a_handler_that_uses_the_network_gets_advice(shop):
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
    assert said(report.set_aside[0]) == "'banana' version 1: PermanentError: no bananas"
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


def test_a_seed_prints_the_same_story_each_time():
    def printed() -> str:
        shop = Shop(version=None)

        async def handler(change: Change[dict]) -> None:
            shop.stored[change.key] = shop.stored.get(change.key, 0) + 1

        return str(shop.simulate(handler, seeds=[1, 2, 3, 4, 5]))

    first = printed()
    random.random()
    assert printed() == first
    assert "Seed" in first


def test_one_seed_alone_finds_what_it_found_among_others():
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
    ("messages", "error"),
    [
        ([], "there is no message"),
        ([{"id": "a", "v": 1}] * 201, "201 messages are too many"),
        ([{"id": "a", "v": 1}, {"id": "a", "v": 1, "name": "b"}], "two messages say different things of key 'a'"),
        ([{"id": "a", "v": 1}, {"v": 2}], "message 2 cannot be read by pipeline 'stock'"),
    ],
)
def test_samples_that_prove_nothing_are_refused(shop, messages, error):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    with pytest.raises(SettingsError, match=error):
        shop.simulate(handler, messages=messages)


def test_what_is_missing_is_reported(shop):
    def handler(change: Change[dict]) -> None:
        shop.write(change)

    for options, error in (
        ({"state": None}, "give state="),
        ({"reset": None}, "give reset="),
        ({"pipeline": "nobody"}, "no pipeline is called 'nobody'"),
        ({"state": lambda connection: 1}, "asks for no Transaction"),
    ):
        with pytest.raises(SettingsError, match=error):
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
