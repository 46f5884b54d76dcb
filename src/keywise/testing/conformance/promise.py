"""A promise of a protocol and the check that holds a plug to it."""

from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

Bench = TypeVar("Bench")


class BrokenPromiseError(AssertionError):
    """A plug broke a promise of its protocol; the message says which one, and what was seen instead."""

    def __init__(self, message: str, seen: str = "") -> None:
        super().__init__(message)
        self.seen = seen
        """What was seen instead, without the promise."""


class UncheckedError(Exception):
    """A promise cannot be checked on this bench; the message says why."""


class Promise(Generic[Bench]):
    """One sentence of a protocol, with its check. Calling it with a factory makes a fresh bench and checks it there."""

    def __init__(self, check: Callable[[Bench], Awaitable[None]], arguments: tuple[Any, ...] = ()) -> None:
        self.name: str = getattr(check, "__name__", repr(check))
        self.text = (check.__doc__ or self.name).strip().splitlines()[0]
        self._check = check
        self._arguments = arguments

    def __repr__(self) -> str:
        return self.name

    async def __call__(self, make: Callable[..., AbstractAsyncContextManager[Bench]]) -> None:
        """Return if the promise is kept; raise `BrokenPromiseError` if it is not."""
        async with make(*self._arguments) as bench:
            try:
                await self._check(bench)
            except AssertionError as error:
                raise BrokenPromiseError(f"{self.text} But {error}", str(error)) from error


class Promises(list[Promise[Bench]]):
    """The promises of one protocol, in reading order; it is also the decorator that adds one."""

    def add(self, *arguments: Any) -> Callable[[Callable[[Bench], Awaitable[None]]], Promise[Bench]]:
        """Decorate a check; the arguments are what its bench is made with."""

        def keep(check: Callable[[Bench], Awaitable[None]]) -> Promise[Bench]:
            promise = Promise(check, arguments)
            self.append(promise)
            return promise

        return keep


def same(what: str, seen: object, wanted: object) -> None:
    """Raise if what was seen is not what was wanted."""
    if seen != wanted:
        raise AssertionError(f"{what} was {shortened(seen)} instead of {shortened(wanted)}")


def near(what: str, seen: float, wanted: float, *, within: float) -> None:
    """Raise if two times are further apart than a store's clock explains."""
    if abs(seen - wanted) > within:
        raise AssertionError(f"{what} was {seen} instead of about {wanted}")


def shortened(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 400 else f"{text[:400]}…"
