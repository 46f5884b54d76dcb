-- name: clock
select extract(epoch from clock_timestamp())::float8, (select controls from keywise_scopes where id = $1);

-- Locks keys: what is there is locked by the attempt to change it, and left as it is.
-- name: place
insert into keywise_marks as marks (scope, key, updated_at)
select $1, key, 0 from unnest($2::bytea[]) as one (key) order by key
on conflict (scope, key) do update set updated_at = marks.updated_at where false
returning key;

-- The row of each key that is locked, in the order of the keys: such a subquery is run for each, with the index.
-- name: rows
select
    one.era, one.version, one.generation, one.deleted, one.updated_at, one.active,
    extract(epoch from clock_timestamp())::float8, (select controls from keywise_scopes where id = $1)
from unnest($2::bytea[]) as wanted (key)
cross join lateral (
    select era, version, generation, deleted, updated_at, active from keywise_marks
    where scope = $1 and key = wanted.key offset 0
) as one;

-- name: active
select wanted.key, one.entry from unnest($2::bytea[]) as wanted (key)
cross join lateral (select entry from keywise_active where scope = $1 and key = wanted.key offset 0) as one;

-- name: rates
select wanted.key, one.at from unnest($2::bytea[]) as wanted (key)
cross join lateral (select at from keywise_rates where scope = $1 and key = wanted.key offset 0) as one;

-- name: mark
insert into keywise_marks as marks (scope, key, era, version, generation, deleted, updated_at, active)
select $1, * from unnest(
    $2::bytea[], $3::int[], $4::bigint[], $5::int[], $6::boolean[], $7::bigint[], $8::boolean[]
)
on conflict (scope, key) do update set
    era = excluded.era, version = excluded.version, generation = excluded.generation,
    deleted = excluded.deleted, updated_at = excluded.updated_at, active = excluded.active;

-- Locks every key, marks those that are idle at orders that are plainly newer, and returns the other keys. If an era,
-- a pause or a barrier is set or a message is older than the retention, it locks and marks nothing, and returns every key.
-- Nothing else in the controls decides about a key. All orders have one generation. A later one is not plainly newer
-- than a tombstone of the same version: the rules decide about it.
-- name: mark_newer
with marked as (
    insert into keywise_marks as marks (scope, key, version, generation, deleted, updated_at)
    select $1, decode(code, 'hex'), version, $6::int, deleted, ceil(extract(epoch from clock_timestamp())::float8)
    from unnest(string_to_array($2, ','), $3::text::bigint[], $4::boolean[]) as one (code, version, deleted)
    where exists (
            select from keywise_scopes
            where id = $1 and (controls = '{}' or controls like '{"era":0,"pauses":[],"move":null,%')
        )
        and $5::float8 >= extract(epoch from clock_timestamp())::float8
    on conflict (scope, key) do update set
        version = excluded.version, generation = excluded.generation, deleted = excluded.deleted,
        updated_at = excluded.updated_at
    where marks.active is null and marks.era is null and (marks.generation is null or marks.generation >= 0)
        and (
            excluded.version > marks.version
            or excluded.version = marks.version and marks.deleted is null
                and excluded.generation > coalesce(marks.generation, 0)
        )
    returning key
)
select decode(code, 'hex') from unnest(string_to_array($2, ',')) as code
where decode(code, 'hex') not in (select key from marked);

-- name: activate
insert into keywise_active (scope, key, token, lease_until, suspicions, suspect_since, entry)
select $1, * from unnest($2::bytea[], $3::bigint[], $4::float8[], $5::bigint[], $6::float8[], $7::text[])
on conflict (scope, key) do update set
    token = excluded.token, lease_until = excluded.lease_until, suspicions = excluded.suspicions,
    suspect_since = excluded.suspect_since, entry = excluded.entry, plain = null;

-- Claims keys that are idle, at changes of one generation that are plainly newer, as in `mark_newer`: what the rules would grant, in one step. The row of the
-- controls is locked first. If an operator changes it meanwhile, it is compared again, and nothing is claimed.
-- If an operator waits for the lock of the scope, nothing is claimed either: share locks that overlap without
-- a gap would keep the operator waiting for ever.
-- Of the controls, only an era, pauses and a barrier decide claims.
-- The claimed version is stored in `updated_at` until the commit: `returning` shows only what is stored.
-- The entry is put together as text, what is common to all in one step: to build it as JSON takes a quarter of the claim.
-- name: claim_newer
with controls as materialized (
    select from keywise_scopes
    where id = $1 and (controls = '{}' or controls like '{"era":0,"pauses":[],"move":null,%')
        and pg_try_advisory_xact_lock_shared($8, $1)
    for share
), clock as materialized (
    select extract(epoch from clock_timestamp())::float8 as now from controls
), common as materialized (
    select now + $6::float8 as lease_until, format(
        '"updated_at":%s,"tried_at":%s,"lease_until":%s,"owner":%s}', now, now, now + $6::float8, to_json($5::text)
    ) as fields
    from clock
), claimed as (
    insert into keywise_marks as marks (scope, key, updated_at, active)
    select $1, decode(one.code, 'hex'), one.version, true
    from clock, unnest(string_to_array($2, ','), $3::text::bigint[]) as one (code, version)
    where clock.now <= $4::float8
    on conflict (scope, key) do update set updated_at = excluded.updated_at, active = true
    where marks.active is null and marks.era is null and (marks.generation is null or marks.generation >= 0)
        and (
            marks.version < excluded.updated_at
            or marks.version = excluded.updated_at and marks.deleted is null and coalesce(marks.generation, 0) < $9::int
        )
    returning key, marks.version, generation, deleted, updated_at as wanted,
        nextval('keywise_tokens') << 24 | floor(random() * 16777216)::bigint as token
)
insert into keywise_active (scope, key, token, lease_until, suspicions, suspect_since, plain, entry)
select
    $1, key, token, lease_until, 0, lease_until + $7::float8, true,
    '{"token":' || token || ',"tried":[0,' || wanted || ',' || $9::int || '],'
    || case when $7::float8 is null then '' else '"intent":[0,' || wanted || ',' || $9::int || '],' end
    || case when version is null then '' else '"mark":[0,' || version || ',' || coalesce(generation, 0) || '],' end
    || case when deleted then '"deleted":true,' else '' end || fields
from common, claimed
returning key, token;

-- Commits claims of `claim_newer` of one generation. Rows of marks are locked first and in the order of their keys, as everywhere: else
-- two transactions could wait for each other. Each row is found once, with the index, however full the tables are.
-- A row of `active` that another transaction has written meanwhile is not plain any more: that is compared again when it
-- is deleted. If it is still plain, no transaction has written the mark of its key since, so the ctid of the mark is valid.
-- name: commit_plain
with locked as materialized (
    select one.key, one.token, marks.place
    from (
        select decode(code, 'hex') as key, token
        from unnest(string_to_array($2, ','), $3::text::bigint[]) as one (code, token)
    ) as one
    cross join lateral (
        select ctid as place from keywise_marks where scope = $1 and key = one.key offset 0 for no key update
    ) as marks
), held as materialized (
    select locked.key, locked.place, active.place as active
    from locked cross join lateral (
        select ctid as place from keywise_active
        where scope = $1 and key = locked.key and token = locked.token and plain offset 0
    ) as active
), ended as (
    delete from keywise_active where ctid = any(array(select active from held)) and plain returning key
)
update keywise_marks set
    version = updated_at, generation = nullif($5::int, 0), deleted = case when key = any($4::bytea[]) then true end,
    updated_at = ceil(extract(epoch from clock_timestamp())::float8), active = null
where ctid = any(array(select place from held where key in (select key from ended)))
returning key;

-- Rows are deleted by the `ctid` of each key. A condition on the keys can become a filter over the whole scope: after
-- a vacuum of a table that was emptied, the server takes it for empty.

-- name: deactivate
delete from keywise_active where ctid = any(array(
    select active.place from unnest($2::bytea[]) as one (key) cross join lateral (
        select ctid as place from keywise_active where scope = $1 and key = one.key offset 0
    ) as active
));

-- Removes the rows of locked keys that hold nothing.
-- name: remove_empty
delete from keywise_marks where ctid = any(array(
    select marks.place from unnest($2::bytea[]) as one (key) cross join lateral (
        select ctid as place from keywise_marks
        where scope = $1 and key = one.key and version is null
            and not exists (select 1 from keywise_active as active where active.scope = $1 and active.key = one.key)
        offset 0
    ) as marks
));

-- name: remove
delete from keywise_marks where ctid = any(array(
    select marks.place from unnest($2::bytea[]) as one (key) cross join lateral (
        select ctid as place from keywise_marks where scope = $1 and key = one.key offset 0
    ) as marks
));

-- name: rate
insert into keywise_rates (scope, key, at) select $1, * from unnest($2::bytea[], $3::float8[])
on conflict (scope, key) do update set at = excluded.at;

-- name: sweep_rates
delete from keywise_rates where ctid = any(array(
    select ctid from keywise_rates where scope = $1 and at <= $2 order by at limit $3 for update skip locked
));

-- name: tokens
select nextval('keywise_tokens') from generate_series(1, $1::int);

-- name: keep_letter
insert into keywise_letters (scope, buried_at, key, version, cause, body, headers, sent_at, source, traceback, routing_key)
values ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11);

-- Claims that need no other lock wait for this one.
-- name: lock_controls
select controls from keywise_scopes where id = $1 for update;

-- name: store_controls
update keywise_scopes set controls = $2 where id = $1;

-- name: add_records
insert into keywise_lines (scope, at, what, key, version, detail, by)
select $1, * from unnest($2::float8[], $3::text[], $4::bytea[], $5::bigint[], $6::text[], $7::text[]);
