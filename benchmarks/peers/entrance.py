"""The command line that all contenders share: fill the queue, or work on it until told to stop."""

import asyncio
import sys
from collections.abc import Awaitable, Callable

from benchmarks.peers.place import Place


def enter(
    fill: Callable[[Place], Awaitable[None]],
    work: Callable[[Place], Awaitable[None]],
    run: Callable[..., object] = asyncio.run,
) -> None:
    """Do what the command line says: `fill` or `work`."""
    does = {"fill": fill, "work": work}[sys.argv[1]]
    run(does(Place.here()))
