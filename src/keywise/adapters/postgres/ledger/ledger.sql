-- name: register
insert into keywise_scopes (name) values ($1) on conflict (name) do nothing;

-- name: number
select id from keywise_scopes where name = $1;

-- name: old_keys
select key from keywise_marks
where scope = $1 and key > $2 and (updated_at < $3 or active)
order by key limit $4;

-- name: inspect
select
    era, version, generation, deleted, updated_at,
    (select entry from keywise_active where scope = $1 and key = $2),
    (select at from keywise_rates where scope = $1 and key = $2 and $3)
from (select 1) as always left join keywise_marks on scope = $1 and key = $2;

-- name: counts
select
    (select count(*) from keywise_marks where scope = $1 and version is not null),
    (select count(*) from keywise_marks where scope = $1 and deleted),
    (select count(*) from keywise_active where token != 0 and lease_until > $2 and scope = $1),
    (select count(*) from keywise_active where scope = $1 and suspicions > 0),
    (select count(*) from keywise_letters where scope = $1);

-- name: suspects
select key from keywise_active
where scope = $1 and suspect_since <= $2
order by suspect_since limit $3;

-- name: dead_letters
select id, buried_at, cause, body, key, version, headers, sent_at, source, traceback, routing_key from keywise_letters
where scope = $1 and buried_at >= $2 and buried_at < $3 and position($4::text in cause) > 0
order by buried_at desc, id desc limit $5;

-- name: delete_dead_letters
delete from keywise_letters where scope = $1 and id = any($2::bigint[]) returning 1;

-- name: load_controls
select controls from keywise_scopes where id = $1;

-- name: eras
select
    exists (select 1 from keywise_active where scope = $1 and token != 0 and lease_until > $2),
    greatest(
        0, (select max(era) from keywise_marks where scope = $1),
        (select max((entry::json ->> 'era')::int) from keywise_active where scope = $1)
    );

-- name: highest_generation
select coalesce(max(generation), 0) from keywise_marks where scope = $1 and generation > 0;

-- name: keys
select key from keywise_marks
where scope = $1 and key > $2 and (version is not null or active)
order by key limit $3;

-- name: held_keys
select key from keywise_active
where scope = $1 and key > $2 and token != 0 and lease_until > $3
order by key limit $4;

-- name: periodic_lock
insert into keywise_periodic_locks as locks select $1, $2, extract(epoch from clock_timestamp())::float8
on conflict (scope, name) do update set done_at = excluded.done_at
where locks.done_at <= excluded.done_at - $3::float8
returning 1;

-- name: history
select at, what, key, version, detail, by from keywise_lines where scope = $1 order by id desc limit $2;

-- name: history_of_key
select at, what, key, version, detail, by from keywise_lines where scope = $1 and key = $3 order by id desc limit $2;

-- name: trim_history
with gone as (
    delete from keywise_lines where scope = $1 and (at < $2 or id <= (
        select id from keywise_lines where scope = $1 order by id desc limit 1 offset $3
    ))
    returning 1
)
select count(*) from gone;
