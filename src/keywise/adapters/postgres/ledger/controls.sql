-- name: load
select controls from keywise_scopes where id = $1;

-- name: store
update keywise_scopes set controls = $2 where id = $1;

-- name: eras
select
    exists (select 1 from keywise_active where scope = $1 and token != 0 and lease_until > $2),
    greatest(
        0, (select max(era) from keywise_marks where scope = $1),
        (select max((entry::json ->> 'era')::int) from keywise_active where scope = $1)
    ),
    (select controls from keywise_scopes where id = $1);

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
