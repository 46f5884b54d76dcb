-- name: scopes
select name from keywise_scopes as scopes
where controls != '{}'
    or exists (select 1 from keywise_marks where scope = scopes.id)
    or exists (select 1 from keywise_active where scope = scopes.id)
    or exists (select 1 from keywise_rates where scope = scopes.id)
    or exists (select 1 from keywise_letters where scope = scopes.id)
    or exists (select 1 from keywise_lines where scope = scopes.id)
order by name;

-- Not by a list of keys, as elsewhere: JSON in SQLite ends at a NUL, and nothing may be left out here.
-- name: entries
select
    wanted.key, marks.era, marks.version, marks.generation, marks.deleted, marks.updated_at, active.entry, rates.at
from (
    select key from keywise_marks where scope = ? and key > ?
    union select key from keywise_active where scope = ? and key > ?
    union select key from keywise_rates where scope = ? and key > ? order by key limit ?
) as wanted
left join keywise_marks as marks on marks.scope = ? and marks.key = wanted.key
left join keywise_active as active on active.scope = ? and active.key = wanted.key
left join keywise_rates as rates on rates.scope = ? and rates.key = wanted.key
order by wanted.key;

-- name: letters
select id, buried_at, cause, body, key, version, headers, sent_at, source, traceback, routing_key from keywise_letters
where scope = ? and id > ? order by id limit ?;

-- name: lines
select id, at, what, key, version, detail, by from keywise_lines where scope = ? and id > ? order by id limit ?;

-- name: raise_tokens
update keywise_meta set value = max(value, ?) where name = 'tokens' returning value;

-- name: clear
delete from keywise_{table} where scope = ? and {column} in (select {column} from keywise_{table} where scope = ? limit ?);
