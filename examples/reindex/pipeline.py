"""The pipeline: it brings the items of a catalogue into a search, and knows the table that they come from.

`keywise why`, `keywise reindex` and the others work on it too: `--app examples/reindex/pipeline.py:app`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.reindex.place import ITEMS, PIPELINE, Place

import keywise


def pipeline_at(place: Place) -> keywise.App:
    """The app with its one pipeline; nothing is opened yet."""
    app = keywise.App(place.ledger)
    products = app.pipeline(PIPELINE, key="id", version="version", deleted={"state": ["gone"]}, poll="50ms")
    products.source(f"{place.ledger}?queue={PIPELINE}")
    products.sink(place.sink)
    products.origin(f"{place.catalogue}?table={ITEMS}&key=id")
    return app


app = pipeline_at(Place.from_environment())
