"""The publishing house: one pipeline, from a queue of publishing events to a table that can be searched.

`keywise why`, `keywise status` and the others work on it too: `--app examples/publishing_house/house.py:app`.
"""

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

import keywise

FOLDER = Path(__file__).parents[2] / "build" / "publishing_house"
FOLDER_VARIABLE = "PUBLISHING_HOUSE"

# The search index follows the table by triggers, so it changes in the same transaction as the ledger.
SCHEMA = """
create table documents (
    id integer primary key, content_id text not null unique, version integer not null, title text, text text
);
create virtual table documents_search using fts5 (title, text, content = 'documents', content_rowid = 'id');
create trigger documents_added after insert on documents begin
    insert into documents_search (rowid, title, text) values (new.id, new.title, new.text);
end;
create trigger documents_removed after delete on documents begin
    insert into documents_search (documents_search, rowid, title, text) values ('delete', old.id, old.title, old.text);
end;
create trigger documents_changed after update on documents begin
    insert into documents_search (documents_search, rowid, title, text) values ('delete', old.id, old.title, old.text);
    insert into documents_search (rowid, title, text) values (new.id, new.title, new.text);
end;
"""


def database_in(folder: Path) -> Path:
    """The one file that holds the queue, the ledger and the table."""
    return folder.resolve() / "house.db"


def house_in(folder: Path) -> keywise.App:
    """The app whose database lies in this folder; nothing is opened yet."""
    url = f"sqlite:///{quote(str(database_in(folder)))}"
    app = keywise.App(url)
    gone = {"document_type": ["gone", "redirect"]}
    # All that happens is kept, so that `keywise why` can tell the whole story of a document.
    search = app.pipeline("search", key="content_id", version="payload_version", deleted=gone, history="all")
    search.source(f"{url}?queue=published")
    search.sink(f"{url}?table=documents&key=content_id&columns=title,text")
    return app


def build(folder: Path) -> None:
    """Start with an empty house, whatever an earlier run has left."""
    folder.mkdir(parents=True, exist_ok=True)
    database = database_in(folder)
    for ending in ("", "-wal", "-shm"):
        database.with_name(database.name + ending).unlink(missing_ok=True)
    with closing(sqlite3.connect(database)) as connection:
        connection.executescript(SCHEMA)


app = house_in(Path(os.environ.get(FOLDER_VARIABLE, FOLDER)))
