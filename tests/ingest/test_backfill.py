"""A backfill announces what the ledger does not know, or knows with other content, and nothing else."""

from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest

from ingest.uploads import LONG, Uploads, versioned
from keywise import Change
from keywise.core.errors import AdminError, UnavailableError
from keywise.core.object_store import ListedObject
from keywise.flow.pipeline import OpenPipeline
from keywise.ingest import backfill as backfills
from keywise.ingest.backfill import Backfill, BackfillReport, NameDigests, backfill
from keywise.ingest.open_objects import OpenObjects
from running import awaited


@pytest.fixture
def uploads(tmp_path: Path) -> Uploads:
    return Uploads(tmp_path)


async def filled(uploads: Uploads, **options: Any) -> BackfillReport:
    report: BackfillReport = await uploads.ask(lambda pipeline: backfill(pipeline, **options))
    return report


def counts(report: BackfillReport) -> tuple[int, int, int, int]:
    return report.listed, report.unchanged, report.announced, report.missing


@awaited
async def test_new_and_changed_objects_are_read_and_the_others_left_alone(uploads: Uploads):
    await uploads.read(uploads.put("a", 1), uploads.put("b", 2))
    uploads.put("b", 2, 3)
    uploads.put("sub/c", 4)
    assert counts(await filled(uploads)) == (3, 1, 2, 0)
    await uploads.work(2)
    assert [uploads.held(name) for name in ("a", "b", "sub/c")] == [[1], [2, 3], [4]]
    assert counts(await filled(uploads)) == (3, 3, 0, 0)
    await uploads.work(0)


@awaited
async def test_announcing_twice_reads_once(uploads: Uploads):
    uploads.put("a", 1)
    for _ in range(2):
        assert (await filled(uploads)).announced == 1
    await uploads.work(2)
    assert uploads.calls == [[0]]


@awaited
async def test_records_of_an_object_that_is_gone_are_deleted(uploads: Uploads):
    await uploads.read(uploads.put("a", 1), uploads.put("b", 2), uploads.put(LONG, 3))
    uploads.remove("b")
    uploads.remove(LONG)
    assert counts(await filled(uploads, missing=False)) == (1, 1, 0, 0)
    assert counts(await filled(uploads)) == (1, 1, 0, 2)
    await uploads.work(2)
    assert list(uploads.written.values()) == [1]
    assert counts(await filled(uploads)) == (1, 1, 0, 0), "tombstones are not missing"


@awaited
async def test_a_missing_object_that_is_back_is_read_and_not_deleted(uploads: Uploads):
    await uploads.read(uploads.put("a", 1), uploads.put("b", 2))
    uploads.remove("b")
    assert (await filled(uploads)).missing == 1
    uploads.put("b", 5)
    await uploads.work(1)
    assert uploads.held("b") == [5]


async def remove(uploads: Uploads, name: str) -> None:
    """As the operator's command does: announce the removal, and let a worker carry it out."""
    uri = uploads.uri(name)
    await uploads.ask(lambda pipeline: pipeline.objects.announce(pipeline, uri, removed=True))
    await uploads.work(1)


@awaited
@pytest.mark.parametrize("name", ["a", LONG], ids=["short", "long"])
async def test_an_object_that_an_operator_has_removed_stays_removed(uploads: Uploads, name: str):
    await uploads.read(uploads.put(name, 1))
    await remove(uploads, name)
    for dry_run in (True, False):
        report = await filled(uploads, dry_run=dry_run)
        assert (counts(report), report.removed) == ((1, 0, 0, 0), 1)
    await remove(uploads, name)
    assert (await filled(uploads)).removed == 1, "the second removal knows what the first one has removed"
    report = await filled(uploads, also_removed=True)
    assert (report.announced, report.removed) == (1, 0)
    await uploads.work(1)
    assert uploads.held(name) == [1]
    assert counts(await filled(uploads)) == (1, 1, 0, 0)


@awaited
async def test_other_content_brings_a_removed_object_back(uploads: Uploads):
    await uploads.read(uploads.put("a", 1))
    await remove(uploads, "a")
    uploads.put("a", 1, 2)
    report = await filled(uploads)
    assert (report.announced, report.removed) == (1, 0)
    await uploads.work(1)
    assert uploads.held("a") == [1, 2]


@awaited
async def test_an_object_that_was_removed_before_it_was_read_stays_removed(uploads: Uploads):
    uploads.put("a", 1)
    await remove(uploads, "a")
    report = await filled(uploads)
    assert (report.announced, report.removed) == (0, 1)


@awaited
async def test_an_object_that_was_gone_and_is_back_is_not_removed(uploads: Uploads):
    """Only an operator removes: this deletion came from a backfill, after a removal that other content has ended."""
    await uploads.read(uploads.put("a", 1), uploads.put("b", 2))
    await remove(uploads, "b")
    await filled(uploads, also_removed=True)
    await uploads.work(1)
    uploads.remove("b")
    await filled(uploads)
    await uploads.work(1)
    assert uploads.held("b") == []
    uploads.put("b", 2)
    report = await filled(uploads)
    assert (report.announced, report.removed) == (1, 0)
    await uploads.work(1)
    assert uploads.held("b") == [2]


@awaited
async def test_a_dry_run_announces_nothing(uploads: Uploads):
    await uploads.read(uploads.put("a", 1), uploads.put("b", 1))
    uploads.remove("a")
    uploads.put("c", 1)
    assert counts(await filled(uploads, dry_run=True)) == (2, 1, 1, 1)
    assert await uploads.depth() == 0


@awaited
async def test_limited_runs_go_on_behind_the_last_name(uploads: Uploads):
    for name in "abcde":
        uploads.put(name, 1)
    after, found = "", []
    while not found or not found[-1].is_listed:
        found.append(await filled(uploads, limit=2, after=after))
        after = found[-1].after
    assert [(one.announced, one.after) for one in found] == [(2, "b"), (2, "d"), (1, "e")]
    await uploads.work(5)
    assert len(uploads.written) == 5


@awaited
async def test_a_limited_run_looks_for_no_missing_objects_before_the_end_of_the_listing(uploads: Uploads):
    await uploads.read(uploads.put("y", 1), uploads.put("z", 1))
    uploads.remove("z")
    uploads.put("a", 1)
    uploads.put("b", 1)
    assert counts(await filled(uploads, limit=1)) == (1, 0, 1, 0)
    assert counts(await filled(uploads, limit=1, after="b")) == (1, 1, 0, 1)


@awaited
async def test_behind_a_name_only_later_names_can_be_missing(uploads: Uploads):
    await uploads.read(*[uploads.put(name, 1) for name in ("a", "m", "z")])
    uploads.remove("a")
    uploads.remove("z")
    assert counts(await filled(uploads, after="b")) == (1, 1, 0, 1)


@awaited
async def test_a_prefix_selects_listed_and_missing_objects(uploads: Uploads):
    await uploads.read(uploads.put("a/1", 1), uploads.put("b/1", 1))
    uploads.remove("a/1")
    uploads.remove("b/1")
    uploads.put("a/2", 1)
    uploads.put("b/2", 1)
    assert counts(await filled(uploads, prefix="a/")) == (1, 0, 1, 1)


@awaited
async def test_names_that_the_pipeline_does_not_want_are_skipped(tmp_path: Path):
    uploads = Uploads(tmp_path, prefix="in/", suffix=".ndjson")
    for name in ("in/a.ndjson", "in/b.txt", "in/c_$folder$", "out/a.ndjson"):
        uploads.put(name, 1)
    report = await filled(uploads)
    assert (report.listed, report.skipped, report.announced) == (3, 2, 1)
    with pytest.raises(AdminError, match="reads names with the prefix 'in/' only"):
        await filled(uploads, prefix="out/")


@awaited
async def test_what_was_begun_with_the_same_content_is_left_alone_and_else_announced(tmp_path: Path):
    uploads = Uploads(tmp_path, part_records=2, attempts_max=1)
    uploads.broken_at = 4
    await uploads.read(uploads.put("a", *range(6)))
    report = await filled(uploads)
    assert (report.running, report.announced) == (1, 0)
    uploads.put("a", *range(3))
    report = await filled(uploads)
    assert (report.running, report.announced) == (0, 1)
    uploads.broken_at = None
    await uploads.work(1)
    assert uploads.held("a") == [0, 1, 2]


@awaited
async def test_an_event_after_a_backfill_can_be_ordered(tmp_path: Path):
    """An object without a version and one with a version would have no order."""
    uploads = Uploads(tmp_path)
    uri = uploads.put("a", 1)
    await filled(uploads)
    await uploads.work(1)
    await uploads.read(uri)
    assert uploads.calls == [[0]], "the event is a duplicate"
    assert await uploads.ask(lambda pipeline: pipeline.admin.dead_letters(10)) == []


@awaited
async def test_a_version_is_above_the_announcement_of_a_backfill(tmp_path: Path):
    uploads = Uploads(tmp_path, dialect=versioned)
    uri = uploads.put("a", 1)
    with pytest.raises(AdminError, match="announce one object through its source"):
        await filled(uploads)
    await uploads.app.send("logs", {"uri": uri, "v": 7})
    await uploads.work(1)
    other = uploads.put("b", 1)
    assert (await filled(uploads)).announced == 1
    await uploads.work(1)
    uploads.put("b", 2)
    await uploads.app.send("logs", {"uri": other, "v": 1})
    await uploads.work(1)
    assert uploads.held("b") == [2]


@awaited
async def test_announcements_go_to_the_bulk_lane(uploads: Uploads, tmp_path: Path):
    uploads.definition.source(f"sqlite:///{tmp_path}/ledger.db?queue=bulk", lane="bulk", dialect="uri")
    uploads.put("a", 1)
    await filled(uploads)

    async def depths(pipeline: OpenPipeline) -> list[int]:
        return [await source.depth() for _, source in pipeline.sources]

    assert await uploads.ask(depths) == [0, 1]


class Failing:
    """The folder of a pipeline, of which the listing breaks off behind some pages of one object."""

    def __init__(self, objects: OpenObjects, pages: int) -> None:
        self._store, self._pages = objects.store, pages
        objects.store = self  # type: ignore[assignment]

    async def list_objects(self, prefix: str = "", after: str = "") -> AsyncGenerator[Sequence[ListedObject], None]:
        async for page in self._store.list_objects(prefix, after):
            for number, one in enumerate(page):
                if number >= self._pages:
                    raise UnavailableError("the store is away")
                yield [one]


@awaited
async def test_after_an_error_the_report_says_where_to_go_on(uploads: Uploads):
    for name in "abc":
        uploads.put(name, 1)

    async def broken_off(pipeline: OpenPipeline) -> BackfillReport:
        assert isinstance(pipeline.objects, OpenObjects)
        Failing(pipeline.objects, 2)
        walk = Backfill(pipeline)
        with pytest.raises(UnavailableError):
            await walk.run()
        return walk.report

    report = await uploads.ask(broken_off)
    assert (report.after, report.announced, report.is_listed) == ("b", 2, False)
    assert (await filled(uploads, after=report.after)).announced == 1
    await uploads.work(3)
    assert len(uploads.written) == 3


@awaited
async def test_an_empty_folder_says_nothing_about_its_objects(uploads: Uploads):
    """It looks like a file system that is not mounted."""
    await uploads.read(uploads.put("a", 1))
    uploads.remove("a")
    with pytest.raises(UnavailableError, match="as if it was not mounted"):
        await filled(uploads)
    assert await uploads.depth() == 0


@awaited
async def test_more_objects_than_a_page(uploads: Uploads, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(backfills, "PAGE", 7)
    monkeypatch.setattr(backfills, "AT_ONCE", 3)
    names = [f"{number:03}" for number in range(40)]
    for name in names:
        uploads.put(name, 1)
    seen: list[int] = []

    async def walked(pipeline: OpenPipeline) -> BackfillReport:
        return await Backfill(pipeline).run(on_page=lambda report: seen.append(report.listed))

    assert (await uploads.ask(walked)).announced == 40
    await uploads.work(40)
    for name in names[::2]:
        uploads.remove(name)
    assert counts(await filled(uploads)) == (20, 20, 0, 20)
    assert seen[-1] == 40


@awaited
async def test_a_pipeline_without_objects_has_no_backfill(uploads: Uploads):
    @uploads.app.pipeline("pages", key="id").source("memory://").apply
    def write(change: Change[Any]) -> None: ...

    async with uploads.app.open("pages", work=False) as pipeline:
        with pytest.raises(AdminError, match="'pages' reads no objects"):
            await backfill(pipeline)


def test_digests_find_the_names_that_were_added_and_no_others():
    digests = NameDigests()
    for number in range(0, 20_000, 2):
        digests.add(f"name-{number}")
    assert [number for number in range(20_000) if f"name-{number}" in digests] == list(range(0, 20_000, 2))
