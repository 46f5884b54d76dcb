-- name: add
insert into keywise_lines (scope, at, what, key, version, detail, by) values (?, ?, ?, ?, ?, ?, ?);

-- name: all
select at, what, key, version, detail, by from keywise_lines where scope = ? order by id desc limit ?;

-- name: of_key
select at, what, key, version, detail, by from keywise_lines where scope = ? and key = ? order by id desc limit ?;

-- name: trim
delete from keywise_lines where scope = ? and (at < ? or id <= (
    select id from keywise_lines where scope = ? order by id desc limit 1 offset ?
));
