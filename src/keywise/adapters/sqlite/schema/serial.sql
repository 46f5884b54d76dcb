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
