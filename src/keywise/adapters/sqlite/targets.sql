-- name: table
select name, type, sql from sqlite_master where name = ? collate nocase and type in ('table', 'view');

-- name: objects
select type, name, tbl_name, sql from sqlite_master;

-- name: columns
select lower(name), upper(type), hidden from pragma_table_xinfo(?);

-- name: live
select target from keywise_targets where name = ? and is_live;

-- name: noted
select pipeline, generation from keywise_targets where name = ? and target = ?;

-- name: note
insert or ignore into keywise_targets (name, target, pipeline, generation, is_live) values (?, ?, ?, ?, false);

-- A target that keywise has not built is noted without a run.
-- name: set_live
insert into keywise_targets (name, target, is_live) values (?, ?, ?)
on conflict (name, target) do update set is_live = excluded.is_live;

-- name: forget
delete from keywise_targets where name = ? and target = ?;

-- name: built
select target from keywise_targets as targets
where name = ? and pipeline = ? and (
    is_live or exists (select 1 from sqlite_master where name = targets.target collate nocase and type = 'table')
)
order by id;
