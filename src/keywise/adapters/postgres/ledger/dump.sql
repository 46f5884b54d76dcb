-- name: scopes
select name from keywise_scopes as scopes
where controls != '{}'
    or exists (select 1 from keywise_marks where scope = scopes.id)
    or exists (select 1 from keywise_active where scope = scopes.id)
    or exists (select 1 from keywise_rates where scope = scopes.id)
    or exists (select 1 from keywise_letters where scope = scopes.id)
    or exists (select 1 from keywise_lines where scope = scopes.id)
order by name collate "C";

-- Such a subquery is run for each key, with the index.
-- name: entries
select
    wanted.key, marks.era, marks.version, marks.generation, marks.deleted, marks.updated_at, active.entry, rates.at
from (
    (select key from keywise_marks where scope = $1 and key > $2 order by key limit $3)
    union (select key from keywise_rates where scope = $1 and key > $2 order by key limit $3)
    order by key limit $3
) as wanted
left join lateral (select * from keywise_marks where scope = $1 and key = wanted.key offset 0) as marks on true
left join lateral (select * from keywise_active where scope = $1 and key = wanted.key offset 0) as active on true
left join lateral (select * from keywise_rates where scope = $1 and key = wanted.key offset 0) as rates on true
order by wanted.key;

-- Columns are null for what is usual, and for a key that only one scope knows.
-- name: different_keys
select key
from (select key, era, version, deleted, active from keywise_marks where scope = $1) as one
full join (select key, era, version, deleted, active from keywise_marks where scope = $2) as other using (key)
where (one.era, one.version, one.deleted) is distinct from (other.era, other.version, other.deleted)
    or one.active or other.active
limit $3;

-- name: row_count
select count(*) from keywise_marks where scope = $1 and version is not null and deleted is null;

-- name: entries_of_keys
select
    wanted.key, marks.era, marks.version, marks.generation, marks.deleted, marks.updated_at, active.entry, null
from unnest($2::bytea[]) as wanted (key)
left join lateral (select * from keywise_marks where scope = $1 and key = wanted.key offset 0) as marks on true
left join lateral (select * from keywise_active where scope = $1 and key = wanted.key offset 0) as active on true;

-- name: letters
select id, buried_at, cause, body, key, version, headers, sent_at, source, traceback, routing_key from keywise_letters
where scope = $1 and id > $2 order by id limit $3;

-- name: lines
select id, at, what, key, version, detail, by from keywise_lines where scope = $1 and id > $2 order by id limit $3;

-- Others may take tokens meanwhile, and a sequence that is set falls back behind them if it is set too near.
-- name: skip_tokens
select setval('keywise_tokens', $1::bigint + $2::bigint) from keywise_tokens where last_value <= $1::bigint;

-- name: clear
delete from keywise_{table} where scope = $1 and {column} = any(array(
    select {column} from keywise_{table} where scope = $1 limit $2
)) returning 1;
