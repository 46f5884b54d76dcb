create table keywise_meta (name text primary key, value) without rowid;

create table keywise_scopes (
    id integer primary key, name text not null unique, controls text not null default '{}'
);

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

create table keywise_rates (
    scope integer not null, key text not null, at real not null, primary key (scope, key)
) without rowid;
create index keywise_rates_by_time on keywise_rates (scope, at);

create table keywise_periodic_locks (
    scope integer not null, name text not null, done_at real not null, primary key (scope, name)
) without rowid;

create table keywise_letters (
    id integer primary key autoincrement, scope integer not null, buried_at real not null, key text not null,
    version integer, cause text not null, body blob not null, headers text, sent_at real not null, source text not null,
    traceback text not null, routing_key text not null
);
create index keywise_letters_by_scope on keywise_letters (scope, id);
create index keywise_letters_by_time on keywise_letters (scope, buried_at);

create table keywise_lines (
    id integer primary key autoincrement, scope integer not null, at real not null, what text not null,
    key text not null, version integer, detail text not null, by text not null
);
create index keywise_lines_by_key on keywise_lines (scope, key, id);
create index keywise_lines_by_scope on keywise_lines (scope, id);

create table keywise_targets (
    id integer primary key autoincrement, name text not null collate nocase, target text not null collate nocase,
    pipeline text, generation integer, is_live integer not null,
    unique (name, target)
);

create table keywise_queues (id integer primary key, name text not null unique, next integer not null);

create table keywise_ready (id integer primary key, sent_at real not null, body blob not null);

create table keywise_held (
    id integer primary key, queue integer not null, visible_at real not null, receipt integer not null,
    count integer not null, sent_at real not null, body blob not null, key text
);
create index keywise_held_by_time on keywise_held (queue, visible_at);
create index keywise_held_by_key on keywise_held (queue, key) where key is not null;
