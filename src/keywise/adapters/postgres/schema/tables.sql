-- Columns that are usually empty cost nothing, and eight columns fit into the smallest header of a row.

create table keywise_scopes (
    id integer generated always as identity primary key, name text not null unique,
    controls text not null default '{}'
);

create table keywise_marks (
    version bigint, updated_at bigint not null, scope integer not null, era integer, generation integer,
    deleted boolean, active boolean, key bytea not null,
    primary key (scope, key)
) with (fillfactor = 90);
-- While `active` is set, the row of `keywise_active` says what holds, and `updated_at` may hold a claimed version.

create table keywise_active (
    token bigint not null, lease_until double precision not null, suspicions bigint not null,
    suspect_since double precision, scope integer not null, plain boolean, key bytea not null, entry text not null,
    primary key (scope, key)
);
-- `plain`: a claim by `claim_newer` that nothing has happened to since; `updated_at` of the mark is its version.
create index keywise_suspect on keywise_active (scope, suspect_since) where suspect_since is not null;
create sequence keywise_tokens;

create table keywise_rates (
    at double precision not null, scope integer not null, key bytea not null, primary key (scope, key)
);
create index keywise_rates_by_time on keywise_rates (scope, at);

create table keywise_periodic_locks (
    scope integer not null, name text not null, done_at double precision not null, primary key (scope, name)
);

create table keywise_letters (
    id bigint generated always as identity primary key, scope integer not null, buried_at double precision not null,
    key bytea not null, version bigint, cause text not null, body bytea not null, headers text,
    sent_at double precision not null, source text not null, traceback text not null, routing_key text not null
);
create index keywise_letters_by_time on keywise_letters (scope, buried_at, id);

create table keywise_lines (
    id bigint generated always as identity primary key, scope integer not null, at double precision not null,
    what text not null, key bytea not null, version bigint, detail text not null, by text not null
);
create index keywise_lines_by_key on keywise_lines (scope, key, id);
create index keywise_lines_by_scope on keywise_lines (scope, id);

create table keywise_targets (
    id bigint generated always as identity primary key, generation bigint, is_live boolean not null,
    name text not null, target text not null, pipeline text,
    unique (name, target)
);
-- What the table of a sink is called as a target, and which run has built those beside it; a name has its schema.

create table keywise_queues (id integer generated always as identity primary key, name text not null unique);
create sequence keywise_messages;

create table keywise_ready (
    id bigint not null default nextval('keywise_messages'), queue integer not null,
    sent_at double precision not null default extract(epoch from clock_timestamp()), body bytea not null,
    primary key (queue, id)
);

create table keywise_held (
    id bigint primary key, queue integer not null, visible_at double precision not null, receipt bigint not null,
    count integer not null, sent_at double precision not null, body bytea not null, key bytea
);
create index keywise_held_by_time on keywise_held (queue, visible_at);
create index keywise_held_by_key on keywise_held (queue, key) where key is not null;
