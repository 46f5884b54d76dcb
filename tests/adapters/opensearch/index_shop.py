"""Pipelines into indexes of a real OpenSearch that nobody else uses."""

import itertools
from pathlib import Path

from app.shop import QUICK, Shop
from keywise.core import events
from running import run
from servers import shared

_numbers = itertools.count(1)


def new_index(mappings: dict[str, str] | None = None, **settings: object) -> tuple[str, str]:
    """The name and the URL of an index that nobody else uses."""
    name = f"pages_{next(_numbers)}"
    return name, shared.opensearch().index(name, mappings, **settings)


def shown(name: str) -> dict[str, dict]:
    return shared.opensearch().documents(name)


class Press(Shop):
    """A queue and a ledger in SQLite, and an index."""

    def __init__(self, folder: Path, url: str, **options: object) -> None:
        super().__init__(folder)
        self.definition = self.app.pipeline("shop", key="id", version="v", deleted={"gone": [True]}, **QUICK, **options)
        self.definition.source(f"{self.url}?visibility={options.get('lease', '60s')}").sink(url)

    async def handles(self, *bodies: object) -> None:
        await self.app.send("shop", *bodies)
        await self.work_until_empty(limit_s=60)

    def causes(self) -> list[str]:
        """Why changes could not be written and had to wait."""
        return [event.cause for event in self.emitted(events.Unavailable) if event.what == "sink"]


def played(story, *, limit_s: float = 100) -> None:
    run(story, limit_s=limit_s)
