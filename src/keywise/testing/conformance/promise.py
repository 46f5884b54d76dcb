"""A promise of a contract, and the check that holds an adapter to it."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

Bench = TypeVar("Bench")


class BrokenPromiseError(AssertionError):
    """An adapter broke a promise of its contract; the message says which one, and what was observed instead."""

    def __init__(self, message: str, seen: str = "") -> None:
        super().__init__(message)
        self.seen = seen
        """What was observed instead, without the sentence of the promise."""


class UncheckedError(Exception):
    """A promise cannot be checked with this fixture; the message says why."""


class Promise(Generic[Bench]):
    """One sentence of a contract, with its check. A call with a factory makes a fresh fixture and checks it."""

    def __init__(self, check: Callable[[Bench], Awaitable[None]], arguments: tuple[Any, ...] = ()) -> None:
        self.name: str = getattr(check, "__name__", repr(check))
        self.text = (check.__doc__ or self.name).strip().splitlines()[0]
        self._check = check
        self._arguments = arguments

    def __repr__(self) -> str:
        return self.name

    async def __call__(self, make: Callable[..., AbstractAsyncContextManager[Bench]]) -> None:
        """Return if the promise is kept; raise `BrokenPromiseError` if it is broken."""
        async with make(*self._arguments) as bench:
            try:
                await self._check(bench)
            except AssertionError as error:
                raise BrokenPromiseError(f"{self.text} But {error}", str(error)) from error


class Promises(list[Promise[Bench]]):
    """The promises of one contract, in reading order; `add` is the decorator for the check of a new one."""

    def add(self, *arguments: Any) -> Callable[[Callable[[Bench], Awaitable[None]]], Promise[Bench]]:
        """Add the decorated check; the arguments are passed to the factory of its fixture."""

        def keep(check: Callable[[Bench], Awaitable[None]]) -> Promise[Bench]:
            promise = Promise(check, arguments)
            self.append(promise)
            return promise

        return keep


def same(what: str, seen: object, wanted: object) -> None:
    """Raise if the observed value is not the expected one."""
    if seen != wanted:
        raise AssertionError(f"{what} was {shortened(seen)} instead of {shortened(wanted)}")


def near(what: str, seen: float, wanted: float, *, within: float) -> None:
    """Raise if two times differ by more than `within`: a store's own clock advances during a check."""
    if abs(seen - wanted) > within:
        raise AssertionError(f"{what} was {seen} instead of about {wanted}")


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}…"
