-- The moment in a condition comes from a subquery, so that it is read once and the index can be used.

-- name: register
insert into keywise_queues (name) values ($1) on conflict (name) do nothing;

-- name: number
select id from keywise_queues where name = $1;

-- name: now
select extract(epoch from clock_timestamp())::float8;

-- name: look
select
    (select id from keywise_ready where queue = $1 order by id limit 1) is not null,
    (select visible_at from keywise_held where queue = $1 order by visible_at limit 1),
    extract(epoch from clock_timestamp())::float8;

-- name: peek
select id, sent_at, body from keywise_ready where queue = $1 and id > $2 order by id limit $3;

-- name: depth
select (select count(*) from keywise_ready where queue = $1) + (select count(*) from keywise_held where queue = $1);

-- name: take_due
update keywise_held
set visible_at = extract(epoch from clock_timestamp())::float8 + $3::float8, receipt = $4, count = count + 1
where id = any(array(
    select id from keywise_held
    where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
    order by visible_at limit $2 for update skip locked
))
returning id, count, sent_at, body;

-- name: take_fresh
with taken as (
    delete from keywise_ready where queue = $1 and id = any(array(
        select id from keywise_ready where queue = $1 order by id limit $2 for update skip locked
    ))
    returning id, sent_at, body
)
insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body)
select id, $1, extract(epoch from clock_timestamp())::float8 + $3::float8, $4, 1, sent_at, body from taken
returning id, count, sent_at, body;

-- name: ack
delete from keywise_held as held
using unnest($1::bigint[], $2::bigint[]) as mine (id, receipt)
where held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt;

-- name: release
update keywise_held as held set visible_at = extract(epoch from clock_timestamp())::float8 + $3::float8
from unnest($1::bigint[], $2::bigint[]) as mine (id, receipt)
where held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt;

-- name: send
with sent as (
    insert into keywise_ready (queue, sent_at, body)
    select $1, extract(epoch from clock_timestamp())::float8, body
    from unnest($2::bytea[]) with ordinality as one (body, n) order by n
)
select pg_notify('keywise', $1::int::text);

-- name: delay
insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body)
select
    nextval('keywise_messages'), $1, extract(epoch from clock_timestamp())::float8 + $3::float8, 0, 0,
    extract(epoch from clock_timestamp())::float8, body
from unnest($2::bytea[]) as one (body);

-- Inside a transaction.

-- name: receive
with due as (
    select id, receipt, count + 1, sent_at, body, false from keywise_held
    where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
    order by visible_at limit $2 for update skip locked
), fresh as (
    delete from keywise_ready where queue = $1 and id = any(array(
        select id from keywise_ready where queue = $1
        order by id limit $2 - (select count(*) from due) for update skip locked
    ))
    returning id, sent_at, body
)
select * from due
union all (select id, 0, 1, sent_at, body, true from fresh order by id);

-- name: take_peeked
with due as (
    select id from keywise_held
    where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
    order by visible_at limit $2 for update skip locked
)
delete from keywise_ready where queue = $1 and id = any((
    select case
        when array(
            select id from keywise_ready where queue = $1 order by id limit $2 for update skip locked
        ) = $3::text::bigint[] and not exists (select 1 from due)
        then $3::text::bigint[] else '{}'
    end
)::bigint[]);

-- name: ack_held
delete from keywise_held where id = any($1::bigint[]);

-- name: hold
insert into keywise_held (queue, visible_at, id, sent_at, body, receipt, count)
select $1, extract(epoch from clock_timestamp())::float8 + $2::float8, *
from unnest($3::bigint[], $4::float8[], $5::bytea[], $6::bigint[], $7::int[])
on conflict (id) do update set visible_at = excluded.visible_at, count = excluded.count;

-- name: put_back
insert into keywise_ready (queue, id, sent_at, body)
select $1, * from unnest($2::bigint[], $3::float8[], $4::bytea[]);
