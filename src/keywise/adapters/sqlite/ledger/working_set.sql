-- name: load_controls
select controls from keywise_scopes where id = ?;

-- name: store_controls
update keywise_scopes set controls = ? where id = ? and controls != ?;

-- name: eras
select
    exists (select 1 from keywise_active where scope = ? and token != 0 and lease_until > ?),
    max(
        coalesce((select max(era) from keywise_marks where scope = ?), 0),
        coalesce((select max(json_extract(entry, '$.era')) from keywise_active where scope = ?), 0)
    );

-- name: periodic_lock
insert into keywise_periodic_locks values (?, ?, ?)
on conflict (scope, name) do update set done_at = excluded.done_at where done_at <= ?;

-- name: marks
select key, era, version, generation, deleted, updated_at from keywise_marks
where scope = ? and key in (select value from json_each(?));

-- name: orders
select key, era, version, generation from keywise_marks
where scope = ? and key in (select value from json_each(?));

-- name: any_active
select 1 from keywise_active where scope = ? limit 1;

-- name: active
select key, entry from keywise_active where scope = ? and key in (select value from json_each(?));

-- name: rates
select key, at from keywise_rates where scope = ? and key in (select value from json_each(?));

-- name: mark
insert into keywise_marks values (?, ?, ?, ?, ?, ?, ?)
on conflict (scope, key) do update set
    era = excluded.era, version = excluded.version, generation = excluded.generation,
    deleted = excluded.deleted, updated_at = excluded.updated_at;

-- name: activate
insert or replace into keywise_active values (?, ?, ?, ?, ?, ?, ?);

-- name: deactivate
delete from keywise_active where scope = ? and key = ?;

-- name: remove
delete from keywise_marks where scope = ? and key = ?;

-- name: rate
insert or replace into keywise_rates values (?, ?, ?);

-- name: sweep_rates
delete from keywise_rates where scope = ? and key in (
    select key from keywise_rates where scope = ? and at <= ? order by at limit ?
);

-- name: tokens
update keywise_meta set value = value + ? where name = 'tokens' returning value;

-- name: keep_letter
insert into keywise_letters (scope, buried_at, key, version, cause, body, headers, sent_at, source, traceback, routing_key)
values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?);

-- name: add_record
insert into keywise_lines (scope, at, what, key, version, detail, by) values (?, ?, ?, ?, ?, ?, ?);
