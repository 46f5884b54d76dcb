"""The tables of keywise in a SQLite file, version by version; an older file is brought up to date when it is opened."""

import sqlite3

from keywise.core.errors import DatabaseError

FIRST = """
create table keywise_meta (name text primary key, value) without rowid;
create table keywise_scopes (id integer primary key, name text not null unique);
create table keywise_marks (
    scope integer not null, key text not null, era integer not null, version integer not null,
    generation integer not null, deleted integer not null, updated_at integer not null,
    primary key (scope, key)
) without rowid;
create table keywise_active (
    scope integer not null, key text not null, token integer not null, lease_until real not null,
    suspicions integer not null, suspect_since real, entry text not null,
    primary key (scope, key)
) without rowid;
create index keywise_suspect on keywise_active (scope, suspect_since) where suspect_since is not null;
create table keywise_letters (
    id integer primary key autoincrement, scope integer not null, buried_at real not null, key text not null,
    version integer, cause text not null, body blob not null, headers text, sent_at real not null, source text not null
);
create index keywise_letters_by_scope on keywise_letters (scope, id);
create table keywise_queues (id integer primary key, name text not null unique, next integer not null);
create table keywise_ready (id integer primary key, sent_at real not null, body blob not null);
create table keywise_held (
    id integer primary key, queue integer not null, visible_at real not null, receipt integer not null,
    count integer not null, sent_at real not null, body blob not null
);
create index keywise_held_by_time on keywise_held (queue, visible_at);
"""

SECOND = """
alter table keywise_scopes add column controls text not null default '{}';
create table keywise_rates (
    scope integer not null, key text not null, at real not null, primary key (scope, key)
) without rowid;
create index keywise_rates_by_time on keywise_rates (scope, at);
create table keywise_periodic_locks (
    scope integer not null, name text not null, done_at real not null, primary key (scope, name)
) without rowid;
create table keywise_lines (
    id integer primary key autoincrement, scope integer not null, at real not null, what text not null,
    key text not null, version integer, detail text not null, by text not null
);
create index keywise_lines_by_key on keywise_lines (scope, key, id);
create index keywise_lines_by_scope on keywise_lines (scope, id);
"""

THIRD = """
create index keywise_letters_by_time on keywise_letters (scope, buried_at);
"""

FOURTH = """
create table keywise_requests (
    scope integer not null, key text not null, place integer not null, id text not null, state integer not null,
    token integer not null, owner text not null, asked_at real not null, ended_at real not null,
    overlaps integer not null, nested integer not null, record blob not null
);
create unique index keywise_requests_by_place on keywise_requests (scope, key, place);
create index keywise_requests_by_id on keywise_requests (scope, id);
create index keywise_requests_waiting on keywise_requests (scope, key, place) where state = 0;
create index keywise_requests_running on keywise_requests (scope, key) where state in (1, 2);
create index keywise_requests_nested on keywise_requests (nested) where nested = 1;
create index keywise_requests_ended on keywise_requests (scope, ended_at) where state = 3;
create index keywise_requests_by_time on keywise_requests (scope, asked_at, place, key);
create table keywise_turn_lines (
    scope integer not null, key text not null, place integer not null, served integer not null,
    token integer not null, owner text not null, turns integer not null, primary key (scope, key)
) without rowid;
create index keywise_turn_lines_held on keywise_turn_lines (scope, owner) where token != 0;
create table keywise_turn_owners (
    scope integer not null, owner text not null, until real not null, primary key (scope, owner)
) without rowid;
create table keywise_turn_news (scope integer primary key, number integer not null, owner text not null);
create table keywise_switches (
    scope integer not null, keys text not null, is_pattern integer not null, switch text not null,
    primary key (scope, keys, is_pattern)
) without rowid;
"""

VERSIONS = (FIRST, SECOND, THIRD, FOURTH)
"""What leads from each version of the schema to the next one. A script that was released is never changed."""


def install(connection: sqlite3.Connection, path: str) -> None:
    """Create or upgrade the tables; two processes may try at once.

    What is up to date is left alone: a worker that starts must not wait for one that was stopped while it wrote.
    """
    if _version(connection, path) == len(VERSIONS):
        return
    connection.execute("begin immediate")
    try:
        for script in VERSIONS[_version(connection, path) :]:
            for statement in script.split(";"):
                connection.execute(statement)
        connection.execute("insert or replace into keywise_meta values ('schema', ?)", (len(VERSIONS),))
        connection.execute("insert or ignore into keywise_meta values ('tokens', 0)")
        connection.execute("commit")
    except BaseException:
        connection.execute("rollback")
        raise


def _version(connection: sqlite3.Connection, path: str) -> int:
    """The version of the tables in a file; 0 if there are none."""
    if connection.execute("select 1 from sqlite_master where name = 'keywise_meta'").fetchone() is None:
        return 0
    found = connection.execute("select value from keywise_meta where name = 'schema'").fetchone()
    if found is None or not isinstance(found[0], int) or not 0 < found[0] <= len(VERSIONS):
        raise DatabaseError(
            f"{path} was written by a newer keywise: its schema is {found and found[0]}, "
            f"this one knows {len(VERSIONS)}; upgrade keywise"
        )
    return found[0]
