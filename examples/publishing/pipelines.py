"""Two pipelines from one stream of publishing events: into a search table, and into a store that is rate limited.

`keywise why`, `keywise status` and the others work on it too: `--app examples/publishing/pipelines.py:app`.
"""

import os
from pathlib import Path
from urllib.parse import quote

from examples.publishing.cms import Event

import keywise
from keywise import Delete, Ignore, Put, Rate

FOLDER = Path(__file__).parents[2] / "build" / "publishing"
FOLDER_VARIABLE, STORE_VARIABLE = "PUBLISHING_FOLDER", "PUBLISHING_STORE"
NAMES = ("search", "store")


def read(event: Event) -> Put | Delete | Ignore:
    """What an event says to these pipelines. A translation that is gone must not delete the document in English."""
    if event.locale != "en":
        return Ignore(f"locale {event.locale}")
    return (Delete if event.is_gone else Put)(event.content_id, event.payload_version)


def pipelines_in(folder: Path, store: str) -> keywise.App:
    """The app whose queues, ledger and search table lie in this folder; nothing is opened yet."""
    url = f"sqlite:///{quote(str(database_in(folder)))}"
    app = keywise.App(url)
    search = app.pipeline("search", read=read, history="all", poll="50ms")
    search.source(f"{url}?queue=search")
    search.sink(f"{url}?table=documents&key=content_id&columns=title,text,links")
    limited = app.pipeline("store", read=read, history="all", poll="50ms", rate=Rate(1, per="1s"))
    limited.source(f"{url}?queue=store")
    limited.sink(f"{store}/documents/{{key}}?timeout=5s")
    return app


def database_in(folder: Path) -> Path:
    return folder.resolve() / "publishing.db"


app = pipelines_in(Path(os.environ.get(FOLDER_VARIABLE, FOLDER)), os.environ.get(STORE_VARIABLE, "http://127.0.0.1:1"))
