"""A handler that hangs, at its work or in a repair, holds up nobody else for long."""

import asyncio
import threading
from collections.abc import Iterator

import pytest

from adapters.function.handler_shop import SHORT, bodies, handle_until, keys, shop_with
from keywise import Change
from keywise.core.events import Repaired
from running import run

HUNG = {"lease": "200ms", "margin": "50ms", "runtime_max": "200ms", "drain": "100ms", "attempts_max": 2}


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """What a hanging thread waits for; it ends with the test."""
    event = threading.Event()
    yield event
    event.set()


def test_changes_that_found_no_free_slot_are_not_blamed_for_it(tmp_path, never):
    """All slots hang until the test lets them go; what never ran is applied then, and is no dead letter."""
    applied: list[str] = []

    def handle(change: Change) -> None:
        if change.key == "hung":
            never.wait()
        applied.append(change.key)

    shop = shop_with(handle, tmp_path, concurrency=1, **HUNG)

    async def dead() -> list[str]:
        return [letter.key for letter in await shop.letters() if letter.key != "hung"]

    async def main() -> list[str]:
        looks = iter(range(60))

        async def is_over() -> bool:
            if next(looks, None) is None:
                never.set()
            return set(applied) >= keys(2) or bool(await dead())

        await handle_until(shop, is_over, {"key": "hung", "version": 1}, *bodies(2))
        return await dead()

    assert run(main()) == []


def test_one_change_that_hangs_does_not_use_up_all_slots(tmp_path, never):
    """It may be tried more often than there are slots, and no try ever ends; others go on all the same."""
    applied: list[str] = []

    def handle(change: Change) -> None:
        if change.key == "hung":
            never.wait()
        applied.append(change.key)

    shop = shop_with(handle, tmp_path, concurrency=2, **(HUNG | {"attempts_max": 4}))

    async def main() -> None:
        sent: list[dict] = []
        looks = iter(range(200))

        async def is_over() -> bool:
            if not sent and (next(looks, None) is None or await shop.letters()):
                sent.extend(bodies(2))
                await shop.app.send("shop", *sent)
            return set(applied) >= keys(2)

        await shop.app.send("shop", {"key": "hung", "version": 1})
        try:
            await shop.work_until(is_over)
        finally:
            await shop.app.close()

    run(main())


def test_a_repair_that_hangs_does_not_hold_up_other_keys(tmp_path):
    """The source of truth does not answer for one key; changes of all others go on."""
    applied: list[str] = []
    asked: list[str] = []

    async def handle(change: Change) -> None:
        if change.key == "bad":
            raise ValueError("was it written?")
        applied.append(change.key)

    async def refetch(key: str) -> None:
        asked.append(key)
        await asyncio.get_running_loop().create_future()

    soon = {"horizon": "100ms", "repair": "50ms", "attempts_max": 1, "drain": "100ms"}
    shop = shop_with(handle, tmp_path, refetch=refetch, **SHORT, **soon)

    async def main() -> None:
        sent: list[dict] = []

        async def is_over() -> bool:
            if not sent and asked:
                sent.extend(bodies(5))
                await shop.app.send("shop", *sent)
            return set(applied) >= keys(5)

        await shop.app.send("shop", {"key": "bad", "version": 1})
        try:
            await shop.work_until(is_over, limit_s=5)
        finally:
            await shop.app.close()

    run(main())


def test_a_repair_that_finds_no_free_slot_has_repaired_nothing(tmp_path, never):
    """The only thread hangs; nothing is marked or cleared before the truth is really written."""
    written: list[tuple[str, int]] = []

    def handle(change: Change) -> None:
        if change.key == "hung":
            never.wait()
        if (change.key, change.version) == ("bad", 1):
            raise ValueError("was it written?")
        written.append((change.key, change.version))

    soon = {"horizon": "800ms", "repair": "50ms", "attempts_max": 1}
    refetch = {"bad": {"key": "bad", "version": 5}}.get
    shop = shop_with(handle, tmp_path, refetch=refetch, concurrency=1, **(HUNG | soon))

    async def main() -> None:
        looks, sent = iter(range(200)), list[dict]()

        async def is_over() -> bool:
            if not sent and await shop.letters():
                sent.append({"key": "hung", "version": 1})
                await shop.app.send("shop", *sent)
            if next(looks, None) is None:
                never.set()
            return any(event.key == "bad" for event in shop.emitted(Repaired))

        await handle_until(shop, is_over, {"key": "bad", "version": 1})

    run(main())
    assert ("bad", 5) in written
