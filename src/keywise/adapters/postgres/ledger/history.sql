-- name: add
insert into keywise_lines (scope, at, what, key, version, detail, by)
select $1, * from unnest($2::float8[], $3::text[], $4::bytea[], $5::bigint[], $6::text[], $7::text[]);

-- name: all
select at, what, key, version, detail, by from keywise_lines where scope = $1 order by id desc limit $2;

-- name: of_key
select at, what, key, version, detail, by from keywise_lines where scope = $1 and key = $3 order by id desc limit $2;

-- name: trim
with gone as (
    delete from keywise_lines where scope = $1 and (at < $2 or id <= (
        select id from keywise_lines where scope = $1 order by id desc limit 1 offset $3
    ))
    returning 1
)
select count(*) from gone;
