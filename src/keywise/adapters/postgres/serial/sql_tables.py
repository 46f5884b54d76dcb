"""The tables of turns in a Postgres database: requests that wait or run, those that are completed, keys and owners.

A script that was released is never changed; the steps on these tables are functions, in `postgres_turns_steps`.
"""

TABLES = """
create table keywise_functions (
    id integer generated always as identity primary key, name text not null unique,
    switches bigint not null default 0, sessions_lost bigint not null default 0
);
create table keywise_turn_owners (
    alive_until double precision not null, function integer not null, owner text not null,
    primary key (function, owner)
) with (fillfactor = 50);
create table keywise_turn_keys (
    place bigint not null default 0, served bigint not null default 0, token bigint not null default 0,
    function integer not null, turns integer not null default 0, waiting integer not null default 0,
    owner text not null default '', key bytea not null,
    primary key (function, key)
) with (fillfactor = 50);
create index keywise_turn_keys_free on keywise_turn_keys (function) where token = 0 and waiting > 0;
create index keywise_turn_keys_held on keywise_turn_keys (function, token) where token != 0;
create table keywise_turn_work (
    place bigint not null, token bigint not null default 0, asked_at double precision not null,
    deadline double precision not null, wait_s double precision not null,
    started_at double precision not null default 0, function integer not null,
    attempts integer not null default 0, beside integer not null default 0,
    atomic boolean not null default false,
    mode text not null, caller text not null, runner text not null, owner text not null default '',
    asked_by text not null, key bytea not null, id bytea not null, within bigint[], body bytea not null,
    primary key (function, key, place)
) with (fillfactor = 70);
create unique index keywise_turn_work_by_id on keywise_turn_work (function, id);
create index keywise_turn_work_observed on keywise_turn_work (function, key, place) where mode = 'observe';
create index keywise_turn_work_nested on keywise_turn_work (function, asked_at) where within is not null;
create table keywise_turn_completed (
    like keywise_turn_work,
    ended_at double precision not null, outcome text not null, answer bytea not null, cause text not null,
    answer_token bigint not null,
    primary key (function, key, place)
);
create index keywise_turn_completed_by_id on keywise_turn_completed (function, id, place);
create index keywise_turn_completed_by_time on keywise_turn_completed (function, asked_at, place, key);
create index keywise_turn_completed_by_end on keywise_turn_completed (function, ended_at);
create index keywise_turn_completed_overlaps on keywise_turn_completed (function, key) where beside > 0;
create table keywise_turn_switches (
    at double precision not null, observe_until double precision not null, function integer not null,
    is_pattern boolean not null, keys bytea not null, mode text not null, by text not null,
    primary key (function, keys, is_pattern)
);
"""
