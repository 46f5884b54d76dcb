-- The latest moment that the file knows to have passed; read once after each boot.
-- name: latest
select max(
    coalesce((select max(updated_at) from keywise_marks), 0),
    coalesce((select max(json_extract(entry, '$.updated_at')) from keywise_active), 0),
    coalesce((select max(done_at) from keywise_periodic_locks), 0),
    coalesce((select max(at) from keywise_lines), 0),
    coalesce((select max(buried_at) from keywise_letters), 0),
    coalesce((select max(sent_at) from keywise_ready), 0)
);
