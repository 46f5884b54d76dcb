"""From deliveries to changes by a function of the user's: its type, its answers and its mistakes."""

import functools
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

import keywise
from causes import said
from keywise.core.bodies import decoder, first_parameter_type
from keywise.core.change import VERSION_MAX, Delete, Delivery, Ignore, Put, order_of
from keywise.core.errors import MalformedError, SettingsError
from keywise.flow.intake import FunctionRoute, MessageReader, ReadBatch


class Page(msgspec.Struct):
    """A typed body."""

    id: str
    v: int = 0


def read_batch_of(function: Callable[..., Any], *bodies: bytes) -> ReadBatch:
    deliveries = [Delivery(number, number, body, 50.0) for number, body in enumerate(bodies or (b'{"id": "a"}',))]
    return MessageReader(FunctionRoute(function), body_max_bytes=1000).read(deliveries, 0, 0.0)


def cause_of(function: Callable[..., Any]) -> str:
    read_batch = read_batch_of(function)
    assert read_batch.tickets == []
    [bad] = read_batch.malformed
    return bad.cause


def test_a_put_says_what_the_key_looks_like():
    [ticket] = read_batch_of(lambda body: Put(body["id"], 5)).tickets
    assert (ticket.change.key, ticket.change.order, ticket.change.deleted) == ("a", order_of(5), False)


def test_a_delete_says_that_the_key_is_gone():
    [ticket] = read_batch_of(lambda body: Delete(body["id"], 5)).tickets
    assert ticket.change.deleted is True


def test_without_a_version_the_change_is_unversioned():
    [ticket] = read_batch_of(lambda body: Put("a")).tickets
    assert ticket.change.version is None


def test_an_ignored_delivery_is_told_with_its_reason():
    read_batch = read_batch_of(lambda body: Ignore("locale"))
    assert [reason for _, reason in read_batch.ignored] == ["locale"]
    assert (read_batch.tickets, read_batch.malformed) == ([], [])


def test_the_body_comes_as_the_type_that_the_function_names():
    def read(page: Page) -> Put:
        assert isinstance(page, Page)
        return Put(page.id, page.v)

    [ticket] = read_batch_of(read, b'{"id": "a", "v": 3, "more": 1}').tickets
    assert Page("a", 3) == ticket.change.value


def test_a_body_that_is_not_of_the_type_is_set_aside():
    """Rule 17: its neighbours are read."""

    def read(page: Page) -> Put:
        return Put(page.id, page.v)

    read_batch = read_batch_of(read, b'{"id": 1}', b'{"id": "a"}', b'{"id": "b", "v": "x"}')
    assert [ticket.change.key for ticket in read_batch.tickets] == ["a"]
    causes = [bad.cause for bad in read_batch.malformed]
    assert ["Expected `str`" in cause or "Expected `int`" in cause for cause in causes] == [True, True]


@pytest.mark.parametrize("error", [ValueError, TypeError, KeyError, ZeroDivisionError, RuntimeError])
def test_a_type_that_refuses_a_value_sets_only_that_body_aside(error: type[Exception]):
    """Rule 17: an error that escaped would stop the consumer, and the next one that gets the message."""

    class Even(msgspec.Struct):
        v: int

        def __post_init__(self) -> None:
            if self.v % 2:
                raise error("odd")

    def read(body: Even) -> Put:
        return Put("a", body.v)

    read_batch = read_batch_of(read, b'{"v": 1}', b'{"v": 2}')
    assert [ticket.change.version for ticket in read_batch.tickets] == [2]
    assert "odd" in read_batch.malformed[0][1]


def test_a_function_that_raises_sets_only_that_body_aside():
    """Rule 17: the cause names what it raised."""

    def read(body: dict[str, Any]) -> Put:
        return Put(body["id"], body["v"])

    read_batch = read_batch_of(read, b'{"id": "a"}', b'{"id": "b", "v": 2}')
    assert [ticket.change.key for ticket in read_batch.tickets] == ["b"]
    assert [said(bad.cause) for bad in read_batch.malformed] == ["read failed: KeyError: 'v'"]


@pytest.mark.parametrize("said", [None, "a", 5, ("a", 1), {"key": "a"}, object, Put])
def test_a_function_that_returns_something_else_is_told_what_to_return(said: object):
    assert "return Put, Delete or Ignore" in cause_of(lambda body: said)


@pytest.mark.parametrize("key", [None, 5, b"a", ("a", "b")])
def test_a_key_must_be_text(key: Any):
    assert "a key must be text" in cause_of(lambda body: Put(key, 1))


@pytest.mark.parametrize(
    ("key", "cause"),
    [("", "empty"), ("a\0", "NUL"), ("k" * 513, "513 bytes"), ("\ud800", "lone surrogate"), ("日" * 171, "513 bytes")],
)
def test_a_key_from_a_function_is_checked_like_any_other(key: str, cause: str):
    assert cause in cause_of(lambda body: Put(key, 1))


@pytest.mark.parametrize(
    ("version", "cause"),
    [
        (True, "whole number"),
        (1.0, "whole number"),
        (float("nan"), "whole number"),
        (b"1", "whole number"),
        (VERSION_MAX + 1, "64 bits"),
        ("yesterday", "RFC 3339"),
        (datetime(2026, 1, 2), "no time zone"),  # noqa: DTZ001
    ],
)
def test_a_version_from_a_function_is_checked_too(version: Any, cause: str):
    assert cause in cause_of(lambda body: Put("a", version))


def test_a_datetime_from_a_function_becomes_its_microseconds():
    [ticket] = read_batch_of(lambda body: Put("a", datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC))).tickets
    assert ticket.change.version == 1_000_000


def test_one_ignored_body_raises_its_reason():
    ignoring = MessageReader(FunctionRoute(lambda body: Ignore("locale")), body_max_bytes=1000)
    silent = MessageReader(FunctionRoute(lambda body: Ignore()), body_max_bytes=1000)
    with pytest.raises(MalformedError, match="locale"):
        ignoring.read_one(b"{}")
    with pytest.raises(MalformedError, match="the pipeline ignores this body"):
        silent.read_one(b"{}")


def test_a_type_that_cannot_be_read_is_refused_before_anything_starts():
    def read(body: list[int] | set[int]) -> Put:
        return Put("a")

    with pytest.raises(SettingsError, match=r"use a msgspec\.Struct, a model or dict"):
        FunctionRoute(read)
    with pytest.raises(SettingsError, match="cannot be read as"):
        decoder(list[int] | set[int])


class Reader:
    """A read function that needs something of its own."""

    def read(self, page: Page) -> Put:
        return Put(page.id, page.v)

    def __call__(self, page: Page) -> Put:
        return self.read(page)


def with_prefix(prefix: str, page: Page) -> Put:
    return Put(prefix + page.id, page.v)


def test_the_first_parameter_says_the_type_whatever_is_called():
    def typed(page: Page, more: int = 0) -> None: ...

    def untyped(page, more=0): ...

    partial = functools.partial(with_prefix, "a-")
    assert [first_parameter_type(one) for one in (typed, untyped)] == [Page, Any]
    assert [first_parameter_type(one) for one in (Reader().read, Reader(), partial)] == [Page, Page, Page]
    [ticket] = read_batch_of(partial, b'{"id": "b", "v": 3}').tickets
    assert (ticket.change.key, ticket.change.version) == ("a-b", 3)


def test_an_async_function_is_refused_before_anything_starts():
    async def read(body: Page) -> Put:
        return Put(body.id)

    with pytest.raises(SettingsError, match="make it a plain def"):
        FunctionRoute(read)


def test_a_function_without_a_parameter_is_refused_before_anything_starts():
    with pytest.raises(SettingsError, match="takes no parameter; give it one, for the message"):
        FunctionRoute(lambda: Put("a"))


def test_a_function_may_see_the_delivery():
    def read(body: dict, delivery: keywise.Delivery) -> Put:
        assert delivery.headers is not None
        return Put(delivery.headers["key"], int(delivery.routing_key) + int(delivery.sent_at))

    delivery = Delivery(1, 1, b"{}", 50.0, 1, {"key": "a", "trace": "t1"}, "7")
    reader = MessageReader(FunctionRoute(read), body_max_bytes=1000)
    [ticket] = reader.read([delivery], 0, 0.0).tickets
    assert (ticket.change.key, ticket.change.version) == ("a", 57)
    assert ticket.change.headers == {"key": "a", "trace": "t1"}, "a handler sees the headers too"
    assert reader.read_one(b"{}", delivery).key == "a"


def test_a_function_gets_an_empty_delivery_for_a_body_that_did_not_come_from_a_source():
    def read(body: dict, delivery: keywise.Delivery) -> Put:
        return Put((delivery.headers or {}).get("key", body["id"]), 1)

    assert MessageReader(FunctionRoute(read), body_max_bytes=1000).read_one(b'{"id": "b"}').key == "b"


def test_a_function_that_asks_for_something_else_is_refused_before_anything_starts():
    def read(body: dict, headers: dict) -> Put:
        return Put("a")

    with pytest.raises(SettingsError, match=r"asks for 'headers'; .* a keywise.Delivery, by annotation"):
        FunctionRoute(read)
