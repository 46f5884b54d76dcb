"""Handlers that ask for pydantic models get them, and what a model refuses is a dead letter that tells no secret."""

from pathlib import Path

import pydantic
import pytest

from adapters.function.handler_shop import handle_all, marked, shop_with
from keywise import Change, Log, Put, Transaction
from running import run

SECRET = "hunter2"


class Item(pydantic.BaseModel):
    """What a message says."""

    key: str
    version: int
    price: int


def read(item: Item) -> Put:
    return Put(item.key, item.version)


@pytest.mark.parametrize("options", [{}, {"read": read}], ids=["fields", "read"])
@pytest.mark.parametrize("transacted", [False, True], ids=["plain", "atomic"])
def test_a_refused_body_is_a_dead_letter_at_once_and_the_others_are_applied(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options, transacted
):
    prices: dict[str, int] = {}

    async def keep(change: Change[Item]) -> None:
        prices[change.key] = change.value.price

    async def keep_inside(change: Change[Item], transaction: Transaction) -> None:
        prices[change.key] = change.value.price

    shop = shop_with(keep_inside if transacted else keep, tmp_path, **options)
    shop.app.observers.append(Log())
    bad = {"key": "bad", "version": 1, "price": SECRET}
    sent = [Item(key="a", version=1, price=5), bad, {"key": "b", "version": 2, "price": 6}]
    [letter] = run(handle_all(shop, *sent))
    assert prices == {"a": 5, "b": 6}
    assert marked(shop) == [("a", 1), ("b", 2)]
    assert ": Item refuses price (int_parsing)" in letter.cause
    assert SECRET not in letter.cause
    assert "price (int_parsing)" in caplog.text
    assert SECRET not in caplog.text
