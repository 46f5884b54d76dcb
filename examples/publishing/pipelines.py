"""Two pipelines from one stream of publishing events: into a search, and into a store that is rate limited.

`keywise why`, `keywise status` and the others work on it too: `--app examples/publishing/pipelines.py:app`.
"""

import msgspec
from examples.publishing.cms import Event
from examples.publishing.place import Place

import keywise
from keywise import Delete, Ignore, Put, Rate


def read(event: Event) -> Put | Delete | Ignore:
    """What an event says to these pipelines. A translation that is gone must not delete the document in English."""
    if event.locale != "en":
        return Ignore(f"locale {event.locale}")
    return (Delete if event.is_gone else Put)(event.content_id, event.payload_version)


def pipelines_at(place: Place) -> keywise.App:
    """The app; nothing is opened yet."""

    def refetch(key: str) -> bytes | None:
        """The current state of a document, if the content of a store is in doubt."""
        records = msgspec.json.decode(place.records.read_bytes(), type=dict[str, msgspec.Raw])
        return bytes(records[key]) if key in records else None

    app = keywise.App(place.database)
    search = app.pipeline("search", read=read, history="all", poll="50ms")
    search.source(place.queue("search"))
    search.sink(place.search or f"{place.database}?table=documents&key=content_id&columns=title,text,links")
    limited = app.pipeline("store", read=read, history="all", poll="50ms", rate=Rate(1, per="1s"))
    limited.source(place.queue("store"))
    limited.sink(f"{place.store}/documents/{{key}}?timeout=5s&missing=no+such+document")
    for pipeline in (search, limited):
        pipeline.refetch(refetch)
    return app


app = pipelines_at(Place.from_environment())
