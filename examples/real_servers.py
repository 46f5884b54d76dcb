"""Real servers for an example: the missing ones are named before anything starts, and all are stopped with it."""

import signal
import sys
from types import FrameType

from servers.shared import why_missing


def demand(*servers: str) -> None:
    """Exit with a message if one of these servers is not on this machine."""
    missing = [f"  {server}: {why}" for server in servers if (why := why_missing(server))]
    if missing:
        advice = "run make servers first, or leave out --servers to run with SQLite in their place"
        sys.exit("\n".join(["these servers are missing:", *missing, advice]))


def end_on_sigterm() -> None:
    """Treat SIGTERM as Ctrl-C, so that the example stops every process that it has started."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        # A second one must not interrupt the stopping.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, interrupt)
    # A shell starts its background jobs with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
