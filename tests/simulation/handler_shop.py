"""A small shop whose handlers are simulated."""

import keywise
from keywise import Change
from keywise.testing import simulate

SEEDS = 30


class Shop:
    """A store in memory, an app whose handlers write to it, and how to simulate them."""

    def __init__(self, **options) -> None:
        self.stored: dict = {}
        self.log: list = []
        self.app = keywise.App("memory://")
        options = {"key": "id", "version": "v", "deleted": {"state": ["gone"]}} | options
        self.pipeline = self.app.pipeline("stock", **options)

    def reset(self) -> None:
        self.stored.clear()
        self.log.clear()

    def simulate(self, handler, **options):
        self.pipeline.apply(handler)
        options = {"state": lambda: dict(self.stored), "reset": self.reset, "seeds": SEEDS} | options
        return simulate(self.app, **options)

    def write(self, change: Change) -> None:
        if change.deleted:
            self.stored.pop(change.key, None)
        else:
            self.stored[change.key] = change.version


def expect_nothing(report) -> None:
    assert report, report
    assert report.seeds == SEEDS
    assert report.calls > 0
    assert sum(report.faults.values()) > 0
