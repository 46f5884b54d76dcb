-- name: held
select 1 from keywise_active where scope = ? and token != 0 and lease_until > ? limit 1;

-- name: held_keys
select key from keywise_active
where scope = ? and key > ? and token != 0 and lease_until > ?
order by key limit ?;

-- name: highest_era
select max(era) from (
    select max(era) era from keywise_marks where scope = ?
    union all select max(json_extract(entry, '$.era')) from keywise_active where scope = ?
);

-- name: periodic_lock
insert into keywise_periodic_locks values (?, ?, ?)
on conflict (scope, name) do update set done_at = excluded.done_at where done_at <= ?;
