-- The moment in a condition comes from a subquery, so that it is read once and the index can be used.
-- Rows of `keywise_ready` are deleted by the `ctid` that was locked. A condition on their ids can become a filter over the
-- whole queue: after a vacuum of a drained queue, the server takes it for empty.

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
set
    visible_at = extract(epoch from clock_timestamp())::float8 + $3::float8, receipt = $4, count = count + 1,
    key = null
where id = any(array(
    select id from keywise_held
    where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
    order by visible_at limit $2 for update skip locked
))
returning id, count, sent_at, body;

-- name: take_fresh
with taken as (
    delete from keywise_ready where ctid = any(array(
        select ctid from keywise_ready where queue = $1 order by id limit $2 for update skip locked
    ))
    returning id, sent_at, body
)
insert into keywise_held (id, queue, visible_at, receipt, count, sent_at, body)
select id, $1, extract(epoch from clock_timestamp())::float8 + $3::float8, $4, 1, sent_at, body from taken
returning id, count, sent_at, body;

-- name: ack
delete from keywise_held as held
using unnest($1::text::bigint[], $2::text::bigint[]) as mine (id, receipt)
where held.id = any($1::text::bigint[]) and held.id = mine.id and held.receipt = mine.receipt;

-- name: release
update keywise_held as held set visible_at = extract(epoch from clock_timestamp())::float8 + $3::float8
from unnest($1::bigint[], $2::bigint[]) as mine (id, receipt)
where held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt;

-- Never waits for a row: an ack that runs at the same time may lock the same rows in another order. What is locked is
-- being acked or released, and needs no extension. Returns the receipts that are no longer those of their messages.
-- name: extend
with extended as (
    update keywise_held set visible_at = extract(epoch from clock_timestamp())::float8 + $3::float8
    where id = any(array(
        select held.id from keywise_held as held
        join unnest($1::bigint[], $2::bigint[]) as mine (id, receipt)
            on held.id = mine.id and held.receipt = mine.receipt
        where held.id = any($1::bigint[])
        for update of held skip locked
    ))
)
select mine.id, mine.receipt from unnest($1::bigint[], $2::bigint[]) as mine (id, receipt)
left join keywise_held as held
    on held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt
where held.id is null;

-- name: park
update keywise_held as held
set visible_at = extract(epoch from clock_timestamp())::float8 + mine.delay_s, key = mine.key
from unnest($1::bigint[], $2::bigint[], $3::float8[], $4::bytea[]) as mine (id, receipt, delay_s, key)
where held.id = any($1::bigint[]) and held.id = mine.id and held.receipt = mine.receipt;

-- What another transaction receives at this moment is skipped: it is visible already.

-- name: recall
with recalled as (
    update keywise_held set visible_at = extract(epoch from clock_timestamp())::float8
    where id = any(array(
        select id from keywise_held
        where queue = $1 and key = any($2::bytea[])
        and visible_at > (select extract(epoch from clock_timestamp())::float8)
        for update skip locked
    ))
)
select pg_notify('keywise', $1::int::text);

-- name: recall_all
with recalled as (
    update keywise_held set visible_at = extract(epoch from clock_timestamp())::float8
    where id = any(array(
        select id from keywise_held
        where queue = $1 and key is not null
        and visible_at > (select extract(epoch from clock_timestamp())::float8)
        for update skip locked
    ))
)
select pg_notify('keywise', $1::int::text);

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
    order by visible_at limit $3 for update skip locked
), fresh as (
    delete from keywise_ready where ctid = any(array(
        select ctid from keywise_ready where queue = $1
        order by id limit $2 - (select count(*) from due) for update skip locked
    ))
    returning id, sent_at, body
)
select * from due
union all (select id, 0, 1, sent_at, body, true from fresh order by id);

-- name: receive_due
select id, receipt, count + 1, sent_at, body, false from keywise_held
where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
order by visible_at limit $2 for update skip locked;

-- name: take_peeked
with due as (
    select id from keywise_held
    where queue = $1 and visible_at <= (select extract(epoch from clock_timestamp())::float8)
    order by visible_at limit $2 for update skip locked
), fresh as materialized (
    select id, ctid as place from keywise_ready where queue = $1 order by id limit $2 for update skip locked
)
delete from keywise_ready where ctid = any(array(
    select place from fresh
    where array(select id from fresh) = $3::text::bigint[] and not exists (select 1 from due)
));

-- name: ack_held
delete from keywise_held where id = any($1::bigint[]);

-- name: hold
insert into keywise_held (queue, visible_at, id, sent_at, body, receipt, count, key)
select $1, extract(epoch from clock_timestamp())::float8 + delay_s, id, sent_at, body, receipt, count, key
from unnest($2::float8[], $3::bigint[], $4::float8[], $5::bytea[], $6::bigint[], $7::int[], $8::bytea[])
    as one (delay_s, id, sent_at, body, receipt, count, key)
on conflict (id) do update set visible_at = excluded.visible_at, count = excluded.count, key = excluded.key;

-- name: put_back
insert into keywise_ready (queue, id, sent_at, body)
select $1, * from unnest($2::bigint[], $3::float8[], $4::bytea[]);
