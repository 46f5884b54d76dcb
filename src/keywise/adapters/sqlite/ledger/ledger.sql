-- name: number
select id from keywise_scopes where name = ?;

-- name: register
insert or ignore into keywise_scopes (name) values (?);

-- name: counts
select
    (select count(*) from keywise_marks where scope = ?),
    (select count(*) from keywise_marks where scope = ? and deleted),
    (select count(*) from keywise_active where token != 0 and lease_until > ? and scope = ?),
    (select count(*) from keywise_active where scope = ? and suspicions > 0),
    (select count(*) from keywise_letters where scope = ?);

-- name: suspects
select key from keywise_active where scope = ? and suspect_since <= ? order by suspect_since limit ?;

-- name: dead_letters
select id, buried_at, cause, body, key, version, headers, sent_at, source, traceback, routing_key from keywise_letters
where scope = ? and buried_at >= ? and buried_at < ? and instr(cause, ?)
order by buried_at desc, id desc limit ?;

-- name: delete_dead_letter
delete from keywise_letters where scope = ? and id = ?;

-- name: highest_generation
select coalesce(max(generation), 0) from keywise_marks where scope = ? and generation > 0;

-- name: keys
select key from keywise_marks where scope = ? and key > ?
union select key from keywise_active where scope = ? and key > ? order by key limit ?;

-- name: held_keys
select key from keywise_active
where scope = ? and key > ? and token != 0 and lease_until > ?
order by key limit ?;

-- name: history
select at, what, key, version, detail, by from keywise_lines where scope = ? order by id desc limit ?;

-- name: history_of_key
select at, what, key, version, detail, by from keywise_lines where scope = ? and key = ? order by id desc limit ?;

-- name: trim_history
delete from keywise_lines where scope = ? and (at < ? or id <= (
    select id from keywise_lines where scope = ? order by id desc limit 1 offset ?
));
