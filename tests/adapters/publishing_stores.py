"""Stores that documents are published to, as the tests of publishing see them; a further sink joins in STORES."""

import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import pytest

from servers import shared

_numbers = itertools.count(1)


class Store(Protocol):
    """One empty store."""

    url: str
    """Of the sink."""

    def content(self) -> dict[str, dict[str, Any]]:
        """What readers are shown, by key."""

    def forget_deletions(self) -> None:
        """Let it forget what was deleted, if it does so."""

    def writes(self) -> int:
        """How many writes it has accepted."""


class SearchIndex:
    """An index of the shared OpenSearch."""

    def __init__(self) -> None:
        self._server = shared.opensearch()
        self.name = f"published_{next(_numbers)}"
        self.url = self._server.index(self.name, gc_deletes="1ms")

    def content(self) -> dict[str, dict[str, Any]]:
        return self._server.documents(self.name)

    def forget_deletions(self) -> None:
        forget_deletions(self.name)

    def writes(self) -> int:
        told = self._server.ask("GET", f"/{self.name}/_stats/indexing")["_all"]["primaries"]["indexing"]
        return int(told["index_total"])


def forget_deletions(index: str) -> None:
    """Deletions are forgotten by a refresh some time after; one of its own tells when that was."""
    _write(index, "proof", "DELETE", 7)
    while not _is_accepted(index, "proof", 1):
        shared.opensearch().ask("POST", f"/{index}/_refresh")
    _write(index, "proof", "DELETE", 2)


def _is_accepted(index: str, key: str, version: int) -> bool:
    try:
        _write(index, key, "PUT", version)
    except AssertionError:
        return False
    return True


def _write(index: str, key: str, method: str, version: int) -> None:
    path = f"/{index}/_doc/{key}?version={version}&version_type=external"
    try:
        shared.opensearch().ask(method, path, {} if method == "PUT" else None)
    except AssertionError as error:
        if "not_found" not in str(error):
            raise


@contextmanager
def search_index() -> Iterator[Store]:
    yield SearchIndex()


class Service:
    """A place of its own in the shared HTTP service, which compares no versions."""

    def __init__(self) -> None:
        self._space = shared.http().space()
        self.url = f"{self._space.url}?missing=no+such+document"

    def content(self) -> dict[str, dict[str, Any]]:
        return {key: json.loads(body) for key, body in self._space.documents.items()}

    def forget_deletions(self) -> None:
        """It never knew of them."""

    def writes(self) -> int:
        return len(self._space.log)


@contextmanager
def service() -> Iterator[Store]:
    yield Service()


STORES: dict[str, Callable[[], AbstractContextManager[Store]]] = {"opensearch": search_index, "http": service}
"""By the server that each needs."""

on_every_store = pytest.mark.parametrize(
    "make_store", [pytest.param(make, id=name, marks=pytest.mark.server(name)) for name, make in STORES.items()]
)
