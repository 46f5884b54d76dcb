-- name: number
select id from keywise_queues where name = ?;

-- name: register
insert or ignore into keywise_queues (name, next) values (?, 0);

-- name: take_ids
update keywise_queues set next = next + ? where id = ? returning next;

-- name: fresh
select id, sent_at, body from keywise_ready where id between ? and ? order by id limit ?;

-- name: due
select id, receipt, count, sent_at, body from keywise_held
where queue = ? and visible_at <= ?
order by visible_at limit ?;

-- name: visible
select 1 where exists (select 1 from keywise_ready where id between ? and ?)
or exists (select 1 from keywise_held where queue = ? and visible_at <= ?);

-- name: depth
select
    (select count(*) from keywise_ready where id between ? and ?) + (select count(*) from keywise_held where queue = ?);

-- name: send
insert into keywise_ready values (?, ?, ?);

-- name: hold
insert or replace into keywise_held values (?, ?, ?, ?, ?, ?, ?, ?);

-- name: hold_again
update keywise_held set visible_at = ?, receipt = ?, count = ?, key = null where id = ?;

-- name: release
update keywise_held set visible_at = ? where id = ? and receipt = ?;

-- name: held
select 1 from keywise_held where id = ? and receipt = ?;

-- name: park
update keywise_held set visible_at = ?, key = ? where id = ? and receipt = ?;

-- The index is named: the planner would read all that is not visible yet.

-- name: recall
update keywise_held indexed by keywise_held_by_key set visible_at = min(visible_at, ?) where queue = ? and key = ?;

-- name: recall_all
update keywise_held indexed by keywise_held_by_key set visible_at = min(visible_at, ?)
where queue = ? and key is not null;

-- name: ack
delete from keywise_held where id = ? and receipt = ?;

-- name: delete_held
delete from keywise_held where id = ?;

-- name: delete_fresh
delete from keywise_ready where id = ?;

-- name: delete_stretch
delete from keywise_ready where id between ? and ?;

-- name: count_stretch
select count(*), min(id) from keywise_ready where id between ? and ?;
