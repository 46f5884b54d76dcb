"""A suspect key is read again from the source of truth, not before the horizon, and written by the same handler."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from adapters.function.handler_shop import handle_all, handle_until, marked, shop_with
from app.shop import Shop
from keywise import Change
from keywise.core.clock import boot_time
from keywise.core.events import Failed, Repaired
from running import run

HORIZON_S = 0.4
SOON = {"horizon": f"{HORIZON_S}s", "repair": "100ms", "attempts_max": 1}


class Store:
    """A store that a handler writes to; the first write of version 1 raises after it has landed."""

    def __init__(self) -> None:
        self.content: dict[str, int] = {}
        self.writes: list[tuple[int | None, bool]] = []
        self.doubted_at = 0.0

    async def handle(self, change: Change) -> None:
        self.writes.append((change.version, change.deleted))
        if change.deleted:
            self.content.pop(change.key, None)
        else:
            self.content[change.key] = change.version
        if len(self.writes) == 1:
            self.doubted_at = boot_time()
            raise ValueError("was it written?")


class Truth:
    """The source of truth, and when it was asked."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.asked_at: list[float] = []

    def refetch(self, key: str) -> Any:
        assert key == "a"
        self.asked_at.append(boot_time())
        return self.body

    async def refetch_async(self, key: str) -> Any:
        return self.refetch(key)


def suspect_shop(folder: Path, store: Store, refetch: Callable | None, **options: object) -> Shop:
    return shop_with(store.handle, folder, refetch=refetch, **(SOON | options))


async def until_repaired(shop: Shop) -> int:
    """Send version 1, whose write is in doubt, and work until it is repaired; how suspect the key is then."""

    async def is_repaired() -> bool:
        return bool(shop.emitted(Repaired))

    await handle_until(shop, is_repaired, {"key": "a", "version": 1})
    entry = await shop.entry("a")
    return entry.suspicions if entry is not None else 0


BODIES = {
    "a dict": {"key": "a", "version": 5},
    "bytes": msgspec.json.encode({"key": "a", "version": 5}),
}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("way", ["plain", "async"])
def test_a_suspect_key_is_written_again_from_the_source_of_truth(tmp_path, kind, way):
    """What was written is committed, too: the message that carries the same version is a duplicate later."""
    store, truth = Store(), Truth(BODIES[kind])
    shop = suspect_shop(tmp_path, store, truth.refetch if way == "plain" else truth.refetch_async)
    assert run(until_repaired(shop)) == 0
    assert truth.asked_at[0] - store.doubted_at >= HORIZON_S, "a late write may land until then"
    assert (store.content, marked(shop)) == ({"a": 5}, [("a", 5)])
    run(handle_all(shop, {"key": "a", "version": 5}, {"key": "a", "version": 4}))
    assert store.writes == [(1, False), (5, False)]


def test_a_key_that_is_gone_from_the_source_of_truth_is_deleted(tmp_path):
    store = Store()
    shop = suspect_shop(tmp_path, store, Truth(None).refetch)
    assert run(until_repaired(shop)) == 0
    assert (store.content, store.writes[-1][1]) == ({}, True)


def test_without_refetch_a_key_stays_suspect(tmp_path):
    store = Store()
    shop = suspect_shop(tmp_path, store, None)

    async def main() -> int:
        waited = iter(range(120))

        async def has_waited() -> bool:
            return next(waited, None) is None

        await handle_until(shop, has_waited, {"key": "a", "version": 1})
        return (await shop.entry("a")).suspicions

    assert run(main()) == 1
    assert store.writes == [(1, False)]


def test_a_truth_that_is_older_than_what_is_committed_is_not_written(tmp_path):
    """A replica may lag: the key stays suspect, and is repaired as soon as the truth has caught up."""
    store, truth = Store(), Truth({"key": "a", "version": 2})
    shop = suspect_shop(tmp_path, store, truth.refetch)

    async def main() -> None:
        await handle_all(shop, {"key": "a", "version": 1})
        await shop.app.send("shop", {"key": "a", "version": 3})

        async def is_repaired() -> bool:
            if len(truth.asked_at) == 2:
                truth.body = {"key": "a", "version": 3}
            return bool(shop.emitted(Repaired))

        await handle_until(shop, is_repaired)

    run(main())
    assert store.writes == [(1, False), (3, False), (3, False)]
    assert (run(shop.entry("a")).suspicions, marked(shop)) == (0, [("a", 3)])


WRONG = {
    "another key": (lambda key: {"key": "b", "version": 5}, "returned the body of 'b'"),
    "no body": (lambda key: {"name": key}, "required field `key`"),
    "an error": (int, "ValueError"),
    "a lost connection": (lambda key: Path("/nowhere").read_bytes(), "FileNotFoundError"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_a_refetch_that_goes_wrong_is_told_and_tried_again(tmp_path, mistake):
    store, (wrong, cause) = Store(), WRONG[mistake]
    asked: list[str] = []

    def refetch(key: str) -> Any:
        asked.append(key)
        return wrong(key) if len(asked) == 1 else {"key": "a", "version": 5}

    shop = suspect_shop(tmp_path, store, refetch, lease="500ms", margin="100ms")
    assert run(until_repaired(shop)) == 0
    assert any(cause in event.cause for event in shop.emitted(Failed)), shop.emitted(Failed)
    assert (store.content, len(asked)) == ({"a": 5}, 2)
