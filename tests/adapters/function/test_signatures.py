"""Every shape that a handler can have gets what its parameters ask for, and its effects are kept."""

import threading
from collections.abc import Callable, Sequence

import msgspec
import pytest

import keywise
from adapters.function.handler_shop import bodies, handle_all, keys, logged, marked, seen_by_others, shop_with
from causes import said
from keywise import Change, Claim, PermanentError, Put, Transaction
from running import run

COUNT = 30


class Calls:
    """What handlers of each shape were called with."""

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.claims: list[Claim] = []
        self.sizes: list[int] = []
        self.threads: set[str] = set()

    def note(self, changes: Sequence[Change], claims: Sequence[Claim] = ()) -> None:
        self.changes += changes
        self.claims += claims
        self.sizes.append(len(changes))
        self.threads.add(threading.current_thread().name)


def plain_handlers(calls: Calls) -> dict[str, Callable]:
    async def async_one(change: Change) -> None:
        calls.note([change])

    def plain_one(change: Change) -> None:
        calls.note([change])

    async def async_many(changes: list[Change]) -> None:
        calls.note(changes)

    def plain_many(changes: Sequence[Change]) -> None:
        calls.note(changes)

    return {"async one": async_one, "plain one": plain_one, "async many": async_many, "plain many": plain_many}


def claiming_handlers(calls: Calls) -> dict[str, Callable]:
    async def async_one(change: Change, claim: Claim) -> None:
        calls.note([change], [claim])

    def plain_one(change: Change, claim: Claim) -> None:
        calls.note([change], [claim])

    async def async_many(changes: list[Change], claims: Claim) -> None:
        calls.note(changes, claims)

    def plain_many(changes: list[Change], claims: Claim) -> None:
        calls.note(changes, claims)

    return {"async one": async_one, "plain one": plain_one, "async many": async_many, "plain many": plain_many}


def transacted_handlers(calls: Calls) -> dict[str, Callable]:
    def write(changes: Sequence[Change], transaction: Transaction) -> None:
        calls.note(changes)
        rows = [(change.key, change.version) for change in changes]
        transaction.connection.executemany("insert into log values (?, ?)", rows)

    async def async_one(change: Change, transaction: Transaction) -> None:
        write([change], transaction)

    def plain_one(change: Change, transaction: Transaction) -> None:
        write([change], transaction)

    async def async_many(changes: list[Change], transaction: Transaction) -> None:
        write(changes, transaction)

    def plain_many(changes: list[Change], transaction: Transaction) -> None:
        write(changes, transaction)

    return {"async one": async_one, "plain one": plain_one, "async many": async_many, "plain many": plain_many}


SHAPES = ("async one", "plain one", "async many", "plain many")
MESSAGES = [*bodies(COUNT), {"key": "gone", "version": 7, "gone": True}]


def check(calls: Calls, shape: str) -> None:
    expected = sorted((body["key"], body["version"], "gone" in body) for body in MESSAGES)
    assert expected == sorted((change.key, change.version, change.deleted) for change in calls.changes)
    assert all(change.value["key"] == change.key for change in calls.changes)
    assert (max(calls.sizes) > 1) == ("many" in shape), "a list holds a batch"
    assert (threading.current_thread().name in calls.threads) == ("async" in shape), "a plain def leaves the loop alone"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_handler_gets_every_change_once(tmp_path, shape):
    calls = Calls()
    assert run(handle_all(shop_with(plain_handlers(calls)[shape], tmp_path), *MESSAGES)) == []
    check(calls, shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_handler_that_asks_for_its_claim_gets_the_one_of_each_change(tmp_path, shape):
    calls = Calls()
    assert run(handle_all(shop_with(claiming_handlers(calls)[shape], tmp_path), *MESSAGES)) == []
    check(calls, shape)
    assert [(claim.key, claim.order) for claim in calls.claims] == [(c.key, c.order) for c in calls.changes]
    assert len({claim.token for claim in calls.claims}) == len(MESSAGES), "a token is never reused"


@pytest.mark.parametrize("shape", SHAPES)
def test_a_handler_that_asks_for_the_transaction_writes_each_effect_once(tmp_path, shape):
    calls = Calls()
    shop = shop_with(transacted_handlers(calls)[shape], tmp_path)
    assert run(handle_all(shop, *MESSAGES)) == []
    check(calls, shape)
    assert sorted((body["key"], body["version"]) for body in MESSAGES) == logged(shop)
    assert logged(shop) == marked(shop)


def test_an_effect_and_its_mark_are_seen_by_others_together(tmp_path):
    """While handlers run, somebody else looks: there are always as many effects as marks."""
    seen: list[tuple[int, int]] = []

    async def handle(change: Change, transaction: Transaction) -> None:
        transaction.connection.execute("insert into log values (?, ?)", (change.key, change.version))
        seen.append((seen_by_others(shop.ledger_file, "log"), seen_by_others(shop.ledger_file, "keywise_marks")))

    shop = shop_with(handle, tmp_path, batch_max=7)
    run(handle_all(shop, *bodies(COUNT)))
    assert all(effects == marks for effects, marks in seen), seen
    assert len({effects for effects, _ in seen}) > 2, "several transactions were looked into"
    assert {key for key, _ in logged(shop)} == keys(COUNT)


@pytest.mark.parametrize("shape", ["async one", "plain one", "async many", "plain many"])
def test_an_error_rolls_back_the_writes_of_its_own_change_only(tmp_path, shape):
    """The handler has written for the bad change, too, when it raises."""
    write = transacted_handlers(Calls())[shape]

    def refuse(changes: Change | list[Change]) -> None:
        if any(change.key == "k17" for change in (changes if isinstance(changes, list) else [changes])):
            raise PermanentError("no room for k17")

    async def async_one(change: Change, transaction: Transaction) -> None:
        await write(change, transaction)
        refuse(change)

    def plain_one(change: Change, transaction: Transaction) -> None:
        write(change, transaction)
        refuse(change)

    async def async_many(changes: list[Change], transaction: Transaction) -> None:
        await write(changes, transaction)
        refuse(changes)

    def plain_many(changes: list[Change], transaction: Transaction) -> None:
        write(changes, transaction)
        refuse(changes)

    handlers = (async_one, plain_one, async_many, plain_many)
    shop = shop_with(dict(zip(SHAPES, handlers, strict=True))[shape], tmp_path)
    [letter] = run(handle_all(shop, *bodies(COUNT)))
    assert (letter.key, letter.version, said(letter.cause)) == ("k17", 1, "PermanentError: no room for k17")
    assert logged(shop) == marked(shop) == sorted((key, 1) for key in keys(COUNT) - {"k17"})


class Book(msgspec.Struct):
    """What a body of the typed tests looks like."""

    key: str
    version: int
    title: str


def book(key: str, title: object = "Emma") -> dict:
    return {"key": key, "version": 1, "title": title}


def typed_handlers(titles: list[str]) -> dict[str, Callable]:
    async def one(change: Change[Book]) -> None:
        titles.append(change.value.title)

    def many(changes: list[Change[Book]]) -> None:
        titles.extend([change.value.title for change in changes])

    async def transacted(change: Change[Book], transaction: Transaction) -> None:
        titles.append(change.value.title)

    return {"one": one, "many": many, "transacted": transacted}


@pytest.mark.parametrize("shape", ["one", "many", "transacted"])
def test_the_annotation_of_a_handler_is_the_type_of_its_values(tmp_path, shape):
    """A body that is not what the type says is a dead letter at once: trying again cannot help."""
    titles: list[str] = []
    shop = shop_with(typed_handlers(titles)[shape], tmp_path)
    [letter] = run(handle_all(shop, book("a", "Emma"), book("b", 5), book("c", "Persuasion")))
    assert sorted(set(titles)) == ["Emma", "Persuasion"]
    assert letter.key == "b"
    assert "Expected `str`, got `int` - at `$.title`" in letter.cause
    assert [key for key, _ in marked(shop)] == ["a", "c"]


def test_the_annotation_of_a_read_function_is_the_type_too(tmp_path):
    titles: list[str] = []

    def read(said: Book) -> Put:
        return Put(said.key, said.version)

    async def handle(change: Change) -> None:
        titles.append(change.value.title)

    [letter] = run(handle_all(shop_with(handle, tmp_path, read=read), book("a"), book("b", 5)))
    assert titles == ["Emma"]
    assert (letter.key, letter.body) == ("", msgspec.json.encode(book("b", 5))), "it was never read so far"
    assert "Expected `str`, got `int` - at `$.title`" in letter.cause


def test_a_handler_that_asks_for_something_else_is_refused_when_it_is_defined(tmp_path):
    app = keywise.App(f"sqlite:///{tmp_path}/shop.db")

    async def wrong(change: Change, connection) -> None: ...

    async def nothing() -> None: ...

    with pytest.raises(keywise.core.errors.SettingsError, match="asks for 'connection'"):
        app.pipeline("a", key="key").apply(wrong)
    with pytest.raises(keywise.core.errors.SettingsError, match="takes no parameter"):
        app.pipeline("b", key="key").apply(nothing)


def test_a_handler_that_asks_for_more_than_it_can_get_is_refused_when_it_is_defined(tmp_path):
    """Otherwise every change of the pipeline would become a dead letter."""
    app = keywise.App(f"sqlite:///{tmp_path}/shop.db")

    async def both(change: Change, claim: Claim, transaction: Transaction) -> None: ...

    async def twice(change: Change, one: Transaction, other: Transaction) -> None: ...

    for handler in (both, twice):
        with pytest.raises(keywise.core.errors.SettingsError):
            app.pipeline(handler.__name__, key="key").apply(handler)


def test_a_handler_of_lists_asks_for_a_list_of_claims(tmp_path):
    calls = Calls()

    async def many(changes: list[Change], claims: list[Claim]) -> None:
        calls.note(changes, claims)

    assert run(handle_all(shop_with(many, tmp_path), *MESSAGES)) == []
    assert [claim.key for claim in calls.claims] == [change.key for change in calls.changes]
