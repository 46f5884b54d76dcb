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

-- Of versions by key, those that the rules have to look at: all but newer ones on idle keys.
-- name: not_plain
select json_each.key from json_each(?2)
left join keywise_marks as marks on marks.scope = ?1 and marks.key = json_each.key
left join keywise_active as active on active.scope = ?1 and active.key = json_each.key
where marks.version >= json_each.value or marks.era != 0 or marks.generation < 0 or active.key is not null;

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

-- Many at once, each at its version, in era 0 and not deleted.
-- name: mark_plain
insert or replace into keywise_marks select ?1, key, 0, value, 0, 0, ?2 from json_each(?3);

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
