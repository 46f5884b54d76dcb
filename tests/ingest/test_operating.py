"""What an operator does with objects, named by their URIs: announce again, pause, reset, replay, and look."""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ingest.uploads import LONG, Uploads, versioned
from keywise.core.change import ChangeHeader, above
from keywise.core.entry import Advance, LeaseTerms, Position
from keywise.core.errors import AdminError, LetterError
from keywise.flow.pipeline import OpenPipeline
from keywise.flow.repair import Repairer
from keywise.ingest.keys import object_key
from keywise.ingest.object_report import ObjectReport, object_figures_of, object_report_of
from keywise.operate.admin import AuditNote, PipelineAdmin
from keywise.operate.inspect import key_report_of
from keywise.operate.replay import Replayer
from keywise.operate.waiting import AdminClaimer, WaitBudget, running_heartbeat
from running import awaited

T = TypeVar("T")
WALL = 1_000_000.0


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


async def act(uploads: Uploads, verb: Callable[[PipelineAdmin], Awaitable[T]]) -> T:
    """Run an action of an operator."""
    async with uploads.app.open("logs", work=False) as pipeline, running_heartbeat(pipeline) as heartbeat:
        claimer = AdminClaimer(pipeline, WaitBudget(pipeline, 30.0, lambda cause: None), heartbeat)
        return await verb(PipelineAdmin(pipeline, AuditNote("ada", "ticket 7"), claimer))


async def reported(uploads: Uploads, given: str) -> ObjectReport:
    report: ObjectReport = await uploads.ask(lambda pipeline: object_report_of(pipeline, given, WALL))
    return report


async def letters(uploads: Uploads) -> list[tuple[int, Any]]:
    found = await uploads.ask(lambda pipeline: pipeline.admin.dead_letters(100))
    return [(number, letter) for number, _, letter in sorted(found)]


async def replay_all(uploads: Uploads, **options: Any) -> None:
    async def send(pipeline: OpenPipeline) -> None:
        replayer = Replayer(**options)
        for number, letter in await letters(uploads):
            await replayer.replay(pipeline, number, letter)

    await uploads.ask(send)


@pytest.mark.parametrize("name", ["a", LONG], ids=["a short URI", "a long URI"])
@awaited
async def test_a_forced_object_is_read_again_and_the_next_version_wins(tmp_path: Path, name: str):
    uploads = Uploads(tmp_path, dialect=versioned)
    uri = uploads.put(name, 1)
    await uploads.app.send("logs", {"uri": uri, "v": 7})
    await uploads.work(1)
    uploads.put(name, 2)
    forced = await act(uploads, lambda admin: admin.force(uri))
    assert (forced.key, forced.order, forced.deleted) == (object_key(uri), (0, 7, 1), False)
    await uploads.work(1)
    assert uploads.held(name) == [2]
    uploads.put(name, 3)
    await uploads.app.send("logs", {"uri": uri, "v": 8})
    await uploads.work(1)
    assert uploads.held(name) == [3]


@awaited
async def test_a_removal_does_not_delete_what_a_newer_order_has_begun(uploads: Uploads):
    """An operator removes an object and then forces it; the worker that read it for that has died."""
    uri = uploads.put("a", 1, 2)
    await uploads.read(uri)
    removed = await act(uploads, lambda admin: admin.remove(uri))

    async def begin_newer(pipeline: OpenPipeline) -> None:
        terms = LeaseTerms("dead worker", 30.0)
        results = await pipeline.ledger.claim([ChangeHeader(object_key(uri), above(removed.order))], terms)
        assert await pipeline.ledger.advance([Advance(results.granted[0], Position(0))]) == []
        await pipeline.ledger.release(results.granted)

    await uploads.ask(begin_newer)
    await uploads.work(1)
    assert uploads.held("a") == [1, 2]


@awaited
async def test_a_repair_waits_for_a_change_of_the_object_that_is_under_way(uploads: Uploads):
    """Announced again meanwhile, the object would start again at the beginning, and its repair would never end."""
    uri = uploads.put("a", 1)
    await uploads.read(uri)

    async def repair(pipeline: OpenPipeline) -> dict[str, str]:
        pipeline.settings = replace(pipeline.settings, horizon_s=1e-9)
        async with running_heartbeat(pipeline) as heartbeat:
            return await Repairer(pipeline, heartbeat).run([object_key(uri)])

    async def leave_under_way(pipeline: OpenPipeline) -> None:
        entry = await pipeline.admin.inspect(object_key(uri))
        assert entry is not None and entry.mark is not None
        await pipeline.admin.mark_suspect([ChangeHeader(object_key(uri), entry.mark)])
        newer = ChangeHeader(object_key(uri), above(entry.mark))
        await pipeline.ledger.release((await pipeline.ledger.claim([newer], LeaseTerms("slow worker", 30.0))).granted)

    await uploads.ask(leave_under_way)
    waits = await uploads.ask(repair)
    assert "under way" in waits[object_key(uri)]
    assert await uploads.depth() == 0


@awaited
async def test_removed_records_stay_away_although_the_object_exists(uploads: Uploads):
    uri = uploads.put("a", 1, 2)
    await uploads.read(uri)
    removed = await act(uploads, lambda admin: admin.remove(uri))
    assert removed.deleted
    await uploads.work(1)
    assert uploads.held("a") == []
    await act(uploads, lambda admin: admin.force(uri))
    await uploads.work(1)
    assert uploads.held("a") == [1, 2]


@awaited
async def test_a_removal_right_after_a_forced_reading_is_no_duplicate_of_it(uploads: Uploads):
    uri = uploads.put("a", 1)
    await uploads.read(uri)
    await act(uploads, lambda admin: admin.force(uri))
    await act(uploads, lambda admin: admin.remove(uri))
    await uploads.work(2)
    assert uploads.held("a") == []


@awaited
async def test_the_uri_of_another_bucket_is_refused(uploads: Uploads):
    for given in ("s3://other/a", "a", f"{uploads.store_url}x/a"):
        with pytest.raises(AdminError, match="give the URI of an object in it"):
            await act(uploads, lambda admin, given=given: admin.force(given))
    assert await uploads.depth() == 0


@awaited
async def test_a_long_uri_is_paused_reset_and_resumed_like_its_key(uploads: Uploads):
    uri = uploads.put(LONG, 1)
    await uploads.read(uri)
    await act(uploads, lambda admin: admin.pause(uri, is_pattern=False))
    controls = await uploads.ask(lambda pipeline: pipeline.control_store.controls())
    assert [pause.keys for pause in controls.pauses] == [object_key(uri)]
    assert await act(uploads, lambda admin: admin.reset(uri)) == 1
    assert await act(uploads, lambda admin: admin.resume(object_key(uri), is_pattern=False))
    await uploads.read(uri)
    assert uploads.calls == [[0], [0]], "a new era reads it again"


@awaited
async def test_history_and_letters_of_a_long_uri_are_found_by_the_uri(uploads: Uploads):
    uri = uploads.put(LONG, 1, "broken")
    await uploads.read(uri)
    await act(uploads, lambda admin: admin.pause(uri, is_pattern=False))
    for given in (uri, object_key(uri)):
        report = await uploads.ask(lambda pipeline, given=given: key_report_of(pipeline, given, WALL))
        assert report is not None
        assert (report.key, [line.what for line in report.history if line.by]) == (object_key(uri), ["paused"])
    by_uri = await uploads.ask(lambda pipeline: key_report_of(pipeline, uri, WALL))
    assert [one.record for one in by_uri.letters] == [1]


# Dead letters.


@awaited
async def test_letters_of_records_announce_their_object_once(uploads: Uploads):
    await uploads.read(uploads.put("a", 1, "one", "two", 4))
    assert [letter.key for _, letter in await letters(uploads)] == [f"{uploads.uri('a')}#{n}" for n in (1, 2)]
    uploads.put("a", 1, 2, 3, 4)
    await replay_all(uploads)
    assert (await uploads.depth(), await letters(uploads)) == (1, [])
    await uploads.work(1)
    assert uploads.held("a") == [1, 2, 3, 4]


@pytest.mark.parametrize("name", ["a", LONG], ids=["a short URI", "a long URI"])
@pytest.mark.parametrize(("from_start", "ordinals"), [(False, [2, 3, 4, 5]), (True, [0, 1, 2, 3, 4, 5])])
@awaited
async def test_the_letter_of_an_object_resumes_unless_it_starts_again(
    tmp_path: Path, name: str, from_start: bool, ordinals: list[int]
):
    uploads = Uploads(tmp_path, part_records=2, attempts_max=1)
    uploads.broken_at = 2
    await uploads.read(uploads.put(name, *range(6)))
    uploads.broken_at, uploads.calls = None, []
    await replay_all(uploads, from_start=from_start)
    await uploads.work(1)
    assert [ordinal for call in uploads.calls for ordinal in call] == ordinals
    assert (uploads.held(name), await letters(uploads)) == ([0, 1, 2, 3, 4, 5], [])


@awaited
async def test_a_notification_that_could_not_be_read_is_read_again(uploads: Uploads):
    await uploads.read("no uri")
    [(_, letter)] = await letters(uploads)
    assert (letter.key, letter.body) == ("", b"no uri")
    await replay_all(uploads)
    await uploads.work(1)
    assert len(await letters(uploads)) == 1


@awaited
async def test_a_letter_of_an_object_that_was_read_since_is_refused(tmp_path: Path):
    uploads = Uploads(tmp_path, attempts_max=1)
    uploads.broken_at = 0
    uri = uploads.put("a", 1)
    await uploads.read(uri)
    uploads.broken_at = None
    await act(uploads, lambda admin: admin.force(uri))
    await uploads.work(1)
    with pytest.raises(LetterError, match=r"applied only once; it stays, drop it with keywise dead drop 1$"):
        await replay_all(uploads)
    assert (await uploads.depth(), len(await letters(uploads))) == (0, 1)


# Reports.


@awaited
async def test_a_report_says_what_the_sink_holds_and_whether_the_store_differs(uploads: Uploads):
    uri = uploads.put("a", 1, "broken", 3)
    await uploads.read(uri)
    report = await reported(uploads, uri)
    assert report.content is not None and report.stored is not None
    assert (report.content.records, report.content.bad, report.extent) == (3, 1, 3)
    assert (report.stored.etag, report.stored.size) == (report.content.etag, 11)
    assert (report.differs, report.progress) == (False, None)
    uploads.put("a", 1)
    assert (await reported(uploads, uri)).differs
    uploads.remove("a")
    uploads.put("other", 1)
    gone = await reported(uploads, uri)
    assert gone.stored is not None
    assert (gone.differs, gone.stored.etag) == (True, "")


@awaited
async def test_a_report_says_how_far_an_object_was_read(tmp_path: Path):
    uploads = Uploads(tmp_path, part_records=2, attempts_max=1)
    uploads.broken_at = 4
    uri = uploads.put("a", *range(6))
    await uploads.read(uri)
    report = await reported(uploads, uri)
    assert report.progress is not None and report.stored is not None
    assert (report.progress.records, report.progress.read, report.progress.etag) == (4, 8, report.stored.etag)
    assert (report.content, report.differs, report.progress.version) == (None, True, None)


@awaited
async def test_a_store_that_gives_no_answer_is_reported_with_the_cause(uploads: Uploads):
    uri = uploads.put("a", 1)
    await uploads.read(uri)
    uploads.remove("a")
    stored = (await reported(uploads, uri)).stored
    assert stored is not None and "as if it was not mounted" in stored.cause
    other = (await reported(uploads, "s3://other/a")).stored
    assert other is not None and other.cause == f"it is not in {uploads.store_url}"


@awaited
async def test_figures_name_the_store_and_the_scale(uploads: Uploads):
    before = await uploads.ask(object_figures_of)
    assert (before.store, before.scale, before.promise) == (uploads.store_url, "", "")
    await uploads.read(uploads.put("a", 1))
    after = await uploads.ask(object_figures_of)
    assert (after.scale, after.promise, after.in_parts) == ("unversioned", "once per object", 0)


@awaited
async def test_figures_name_the_objects_that_are_being_read(tmp_path: Path):
    uploads = Uploads(tmp_path, part_records=2, lease="5m", runtime_max="10m")
    seen: list[Any] = []

    async def look_at_the_last_part(first: int) -> None:
        if first == 4:
            seen.append(await uploads.ask(object_figures_of))

    uploads.on_write = look_at_the_last_part
    uri = uploads.put("a", *range(6))
    await uploads.read(uri)
    [figures] = seen
    assert (figures.in_parts, [(one.uri, one.records, one.read) for one in figures.largest]) == (1, [(uri, 4, 8)])
