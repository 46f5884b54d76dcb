"""The pipeline: it reads the log files that notifications announce into a table, one row per line.

`keywise why`, `keywise status` and the others work on it too: `--app examples/objects/pipeline.py:app`.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.objects.place import KEYWISE, Place
from examples.objects.uploads import PART_LINES

import keywise

PIPELINE = "logs"


def pipeline_at(place: Place) -> keywise.App:
    """The app with its one pipeline; nothing is opened yet."""
    database = place.database(KEYWISE)
    app = keywise.App(database)
    # Short parts and a short lease, so that there is something to see: the defaults suit most pipelines.
    logs = app.objects(
        PIPELINE,
        store=place.store_url,
        format="ndjson",
        suffix=".ndjson",
        part_records=PART_LINES,
        lease="5s",
        history="all",
    )
    logs.source(place.queue(KEYWISE), dialect=place.dialect)
    logs.sink(f"{database}?table=lines")
    return app


app = pipeline_at(Place.from_environment())
