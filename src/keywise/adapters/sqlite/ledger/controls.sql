-- name: held_keys
select key from keywise_active
where scope = ? and key > ? and token != 0 and lease_until > ?
order by key limit ?;
