"""Pages that go from RabbitMQ to a search engine or an HTTP service, with their ledger in Redis."""

from collections.abc import Callable
from pathlib import Path

from flow.degraded.outage_shop import Workplace

PAGES = """
import json
from pathlib import Path

import keywise
from keywise import Rate

app = keywise.App({ledger!r})
pages = app.pipeline(
    "pages", key="id", version="v", deleted={{"gone": [True]}}, {options}poll="50ms", backoff="10ms",
    backoff_max="100ms", lease="3s", margin="500ms", horizon="1s", repair="200ms", maintenance="500ms",
    ledger_grace="300ms",
)
pages.source({source!r}).sink({sink!r})


@pages.refetch
def truth(key: str) -> bytes | None:
    body = json.loads(Path("truth.json").read_text()).get(key)
    return None if body is None else json.dumps(body).encode()
"""


class PublishingShop(Workplace):
    """What its store shows is asked of the store."""

    pipeline = "pages"

    def __init__(
        self, folder: Path, ledger: str, source: str, sink: str, stock: Callable[[], dict[str, int]], options: str = ""
    ) -> None:
        super().__init__(folder, PAGES.format(ledger=ledger, source=source, sink=sink, options=options))
        self.stock = stock
