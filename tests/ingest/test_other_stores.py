"""Announcements of another store are ignored, and a worker warns of them once: the store may be misspelt."""

from pathlib import Path

from ingest.uploads import Uploads
from keywise.core import events
from running import awaited


@awaited
async def test_the_first_announcement_of_another_store_is_a_warning_with_an_example(tmp_path: Path):
    uploads = Uploads(tmp_path)
    seen: list[events.Event] = []
    uploads.app.observers.append(seen.append)
    await uploads.read("s3://upload/a", uploads.put("a", 1), "s3://upload/b", "s3://other/c")
    warnings = [event for event in seen if isinstance(event, events.Misdirected)]
    assert [one.cause for one in warnings] == [f"'s3://upload/a' is not in the store {uploads.store_url}"]
    assert all(words in warnings[0].advice for words in ("counted as ignored", "check store=", "its queue"))
    assert sum(event.changes for event in seen if isinstance(event, events.Ignored)) == 3
    assert uploads.held("a") == [1]


@awaited
async def test_other_names_of_the_store_are_no_warning(tmp_path: Path):
    uploads = Uploads(tmp_path, suffix=".ndjson")
    seen: list[events.Event] = []
    uploads.app.observers.append(seen.append)
    await uploads.read(uploads.put("a.csv", 1))
    assert [event.reason for event in seen if isinstance(event, events.Ignored)] == ["other name"]
    assert not [event for event in seen if isinstance(event, events.Misdirected)]
