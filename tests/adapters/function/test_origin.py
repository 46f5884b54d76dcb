"""An object of the user's as an origin: what it may return, and what is refused."""

from typing import Any

import pytest

from keywise.adapters.function.origin import FunctionOrigin
from keywise.core.errors import KeywiseError, SettingsError, UnavailableError
from keywise.core.origin import CURSOR_MAX_BYTES, Page, Shard
from running import run

ALL = Shard("all")


class Table:
    """Answers with what it was made with."""

    def __init__(self, *, shards: Any = (ALL,), page: Any = None, rows: Any = None) -> None:
        self._shards, self._page, self._rows = shards, page, rows

    def shards(self, size: int) -> Any:
        return self._shards

    def scan(self, shard: Shard, after: str, limit: int) -> Any:
        return self._page

    def fetch(self, keys: Any) -> Any:
        if isinstance(self._rows, Exception):
            raise self._rows
        return self._rows


async def opened(table: Table, method: str, *arguments: Any) -> Any:
    async with FunctionOrigin(table) as origin:
        return await getattr(origin, method)(*arguments)


def test_rows_are_values_or_bytes():
    page = Page([{"id": "a"}, b'{ "id": "b" }'], "b", is_last=True)
    assert run(opened(Table(page=page), "scan", ALL, "", 10)) == Page([b'{"id":"a"}', b'{ "id": "b" }'], "b", True)


def test_a_key_without_a_row_is_left_out_and_others_are_not_let_in():
    rows = {"a": {"id": "a"}, "b": None, "not asked for": {}}
    assert run(opened(Table(rows=rows), "fetch", ["a", "b", "c"])) == {"a": b'{"id":"a"}'}


def test_an_object_is_not_consistent_unless_it_says_so():
    table = Table()
    assert FunctionOrigin(table).is_consistent is False
    table.is_consistent = True
    assert FunctionOrigin(table).is_consistent is True
    table.is_consistent = False
    assert FunctionOrigin(table).is_consistent is False


@pytest.mark.parametrize("no_origin", [Table, {}, None, 5, lambda key: None])
def test_what_has_not_the_three_methods_is_refused(no_origin):
    with pytest.raises(SettingsError, match=r"cannot be an origin; write a URL, or an object with the methods shards"):
        FunctionOrigin(no_origin)


LONG = "x" * (CURSOR_MAX_BYTES + 1)
FAULTS = {
    "an empty cursor": ("scan", {"page": Page([], "", is_last=False)}, "scan.. returned an empty cursor"),
    "a long cursor": ("scan", {"page": Page([], LONG, is_last=False)}, "a cursor with more than 3072 bytes"),
    "a name twice": ("shards", {"shards": [ALL, ALL]}, "two shards of the same name"),
    "long bounds": ("shards", {"shards": [Shard("a", LONG)]}, "bounds of shard 'a' with more than 3072 bytes"),
}


@pytest.mark.parametrize(("method", "answers", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_what_the_ledger_could_not_keep_is_refused(method, answers, message):
    arguments = (ALL, "", 10) if method == "scan" else (10,)
    with pytest.raises(KeywiseError, match=message):
        run(opened(Table(**answers), method, *arguments))


def test_a_service_that_cannot_be_reached_is_unavailable_and_a_bug_stays_a_bug():
    with pytest.raises(UnavailableError, match="the origin cannot be reached: refused"):
        run(opened(Table(rows=ConnectionError("refused")), "fetch", ["a"]))
    with pytest.raises(ZeroDivisionError):
        run(opened(Table(rows=ZeroDivisionError()), "fetch", ["a"]))
