"""The stopwatch of the profile counts every call into SQLite, also those that are no statement."""

import sqlite3
from pathlib import Path

from benchmarks.stopwatch import Stopwatch, watched_connection


def test_a_commit_is_counted_for_the_layer_that_runs(tmp_path: Path):
    stopwatch = Stopwatch(cpu=False)
    connection = sqlite3.connect(tmp_path / "file.db", factory=watched_connection(stopwatch, {}), isolation_level=None)
    connection.execute("create table pages (key text)")
    connection.execute("begin immediate")
    connection.execute("insert into pages values ('a')")
    with stopwatch.layer("commit"):
        connection.commit()
    assert stopwatch.in_sqlite["commit"] > 0
    connection.close()
