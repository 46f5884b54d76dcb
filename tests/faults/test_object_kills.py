"""A worker is killed with `kill -9` at every part of an object: each record is written once, little is read again."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from chaos.fleet import until
from chaos.object_fleet import ObjectWorker
from chaos.object_worker import ObjectAssignment
from ingest.counting_store import counting_store
from ingest.object_rig import ENVIRONMENT, Bucket, Folder, ObjectRig, ndjson
from running import run
from servers import shared

pytestmark = pytest.mark.timeout(600)

PARTS, PART_RECORDS = 8, 100
MORTAL = {"lease": "1s", "margin": "200ms", "poll": "50ms", "backoff": "10ms", "part_records": PART_RECORDS}
TABLE = "create table logs (object text, ordinal int, version int, body text, primary key (object, ordinal))"


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def deaths_until_empty(folder: Path, rig: ObjectRig, assignment: ObjectAssignment) -> int:
    """Start the worker again whenever it has killed itself, until nothing is left to do."""
    worker, deaths = ObjectWorker(folder, "worker", assignment).start(), 0

    async def depth() -> int:
        async with rig.opened() as pipeline:
            return await pipeline.sources[0][1].depth()

    def is_over() -> bool:
        nonlocal deaths
        deaths += worker.start_again_if_killed()
        return run(depth()) == 0

    try:
        until(is_over, "the object to be written", limit_s=60)
        worker.drain()
    finally:
        worker.close()
    return deaths


@pytest.mark.server("seaweedfs")
@pytest.mark.parametrize("dies", ["inside", "behind"])
def test_each_part_is_written_once_though_a_worker_dies_at_each(tmp_path: Path, dies: str):
    """Each life reads from where the last part that was committed ends: at most one part is read again."""
    file = tmp_path / "ledger.db"
    lines = ndjson(PARTS * PART_RECORDS, text="x" * 200).splitlines(keepends=True)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute(TABLE)
    with counting_store(shared.seaweed().port) as store:
        bucket, ledger = Bucket(port=store.port), f"sqlite:///{file}"
        rig = ObjectRig(bucket, ledger, sink=f"{ledger}?table=logs", **MORTAL)
        run(rig.put("o", b"".join(lines)))
        queue, notes = f"{ledger}?visibility=1s", str(tmp_path / "notes")
        assignment = ObjectAssignment(ledger, queue, bucket.url, notes, dialect="s3", dies=dies, options=MORTAL)
        deaths = deaths_until_empty(tmp_path, rig, assignment)
        starts = store.starts_of(f"/{bucket.name}/o")
    # The last part ends with the commit, behind which no part follows.
    assert deaths == (PARTS if dies == "inside" else PARTS - 1)
    rows = run(rig.rows("ordinal, body"))
    assert [(ordinal, json.loads(body)["n"]) for ordinal, body in rows] == [(n, n) for n in range(len(lines))]
    assert run(rig.letters()) == []
    boundaries = [len(b"".join(lines[: part * PART_RECORDS])) for part in range(PARTS)]
    # Killed inside its transaction, a part is read again from its first byte; behind it, no byte is.
    assert starts == ([0, *boundaries] if dies == "inside" else boundaries)


def test_changes_of_an_object_are_applied_though_a_worker_dies_behind_each_part(tmp_path: Path):
    """Each key has three versions, in parts of their own and in a wrong order."""
    keys, ledger = [f"k{number}" for number in range(PART_RECORDS)], f"sqlite:///{tmp_path}/ledger.db"
    content = b"".join(json.dumps({"id": key, "v": v}).encode() + b"\n" for v in (2, 3, 1) for key in keys)
    options = MORTAL | {"kind": "envelope", "key": "id", "version": "v"}
    sink = f"{ledger}?table=stock"
    rig = ObjectRig(Folder(tmp_path / "objects"), ledger, sink=sink, **options)
    run(rig.put("o", content))
    queue, notes = f"{ledger}?visibility=1s", str(tmp_path / "notes")
    assignment = ObjectAssignment(ledger, queue, rig.place.url, notes, sink=sink, dies="behind", options=options)
    assert deaths_until_empty(tmp_path, rig, assignment) == 2
    with closing(sqlite3.connect(tmp_path / "ledger.db")) as connection:
        assert dict(connection.execute("select key, version from stock").fetchall()) == dict.fromkeys(keys, 3)
    assert run(rig.letters()) == [] and run(rig.letters("logs/records")) == []
