"""The steps under advisory locks, as functions of the server: a turn is given only to a session that has its lock.

The row of a key says who holds it, as without locks. The lock excludes other programs too, which may take it as well:
`select pg_advisory_lock(keywise_serial_lock('function', 'key'))`.
"""

LOCKING = """
create function keywise_turn_number_1(_f integer, _key bytea) returns bigint language sql immutable as $$
    select hashtextextended(encode(_key, 'hex'), _f)
$$;
create function keywise_serial_lock(_function text, _key text) returns bigint language sql stable as $$
    select keywise_turn_number_1(id, convert_to(_key, 'UTF8')) from keywise_functions where name = _function
$$;
create function keywise_turn_unseat_1(_number bigint) returns boolean language plpgsql as $$
begin
    -- By its row the key is the caller's: a session of ours that still has the lock is that of an owner that was lost.
    perform pg_terminate_backend(l.pid) from pg_locks as l join pg_stat_activity as a on a.pid = l.pid
    where l.locktype = 'advisory' and l.granted and l.objsubid = 1 and l.pid != pg_backend_pid()
        and l.database = (select oid from pg_database where datname = current_database())
        and (l.classid::bigint << 32 | l.objid::bigint) = _number and a.application_name = 'keywise lock';
    return found;
exception when insufficient_privilege then
    -- It is of another user of the database, and has to be waited for.
    return false;
end $$;
create function keywise_turn_seize_1(_number bigint) returns boolean language plpgsql as $$
begin
    if pg_try_advisory_lock(_number) then
        return true;
    elsif not keywise_turn_unseat_1(_number) then
        return false;
    end if;
    for _try in 1..100 loop
        if pg_try_advisory_lock(_number) then
            return true;
        end if;
        perform pg_sleep(0.01);
    end loop;
    return false;
end $$;
create function keywise_turn_locked_step_1(
    _f integer, _terms keywise_turn_terms, _replies keywise_turn_reply[], _requests keywise_turn_request[]
) returns setof keywise_turn_row language plpgsql as $$
declare
    _row keywise_turn_row;
    _keys bytea[];
    _tokens bigint[];
    _seized bytea[] := '{}';
    _missed bytea[] := '{}';
    _ids bytea[] := '{}';
    _not_begun bigint[] := '{}';
    _refused bytea[] := '{}';
begin
    select array_agg(k.key), array_agg(k.token) into _keys, _tokens from keywise_turn_keys as k
    where k.function = _f and k.token = any(array(select distinct token from unnest(_replies) where token != 0))
        and k.owner = _terms.owner;
    for _row in select * from keywise_turn_step_1(_f, _terms, _replies, _requests) loop
        if _row.what = 'turn' then
            if (_row.work).key != all(_seized || _missed) then
                if keywise_turn_seize_1(keywise_turn_number_1(_f, (_row.work).key)) then
                    _seized := _seized || (_row.work).key;
                else
                    _missed := _missed || (_row.work).key;
                end if;
            end if;
            if (_row.work).key = any(_missed) then
                _ids := _ids || (_row.work).id;
                _not_begun := _not_begun || (_row.work).token;
                continue;
            end if;
        elsif _row.what = 'refused' then
            _refused := _refused || _row.answer;
        end if;
        return next _row;
    end loop;
    if cardinality(_ids) > 0 then
        perform keywise_turn_give_back_1(_f, _terms.owner, 0, _ids, _not_begun, _terms.causes);
    end if;
    -- The lock of a turn that was lost is given back by the client, which knows its key: as often as it was taken.
    perform pg_advisory_unlock(keywise_turn_number_1(_f, over.key)) from unnest(_keys, _tokens) as over (key, token)
    where not exists (
        select from keywise_turn_keys as k where k.function = _f and k.key = over.key and k.token = over.token
    ) and exists (select from unnest(_replies) as one where one.token = over.token and one.id != all(_refused));
end $$;
create function keywise_turn_unlock_1(_f integer, _keys bytea[]) returns void language sql as $$
    select pg_advisory_unlock(keywise_turn_number_1(_f, key)) from unnest(_keys) as key
$$;
create function keywise_turn_locked_back_1(_f integer, _terms keywise_turn_terms, _ids bytea[], _tokens bigint[])
returns void language plpgsql as $$
declare
    _keys bytea[];
    _held bigint[];
begin
    select array_agg(key), array_agg(token) into _keys, _held from keywise_turn_keys
    where function = _f and token = any(_tokens) and owner = _terms.owner;
    perform keywise_turn_back_1(_f, _terms, _ids, _tokens);
    perform pg_advisory_unlock(keywise_turn_number_1(_f, over.key)) from unnest(_keys, _held) as over (key, token)
    where not exists (
        select from keywise_turn_keys as k where k.function = _f and k.key = over.key and k.token = over.token
    );
end $$;
create function keywise_turn_locked_renew_1(
    _f integer, _terms keywise_turn_terms, _tokens bigint[], _before float8
) returns setof bigint language plpgsql as $$
declare
    _keys bytea[];
    _held bigint[];
begin
    select array_agg(key), array_agg(token) into _keys, _held from keywise_turn_keys
    where function = _f and token != 0 and owner = _terms.owner;
    return query select * from keywise_turn_renew_1(_f, _terms, _tokens, _before);
    perform pg_advisory_unlock(keywise_turn_number_1(_f, over.key)) from unnest(_keys, _held) as over (key, token)
    where not exists (
        select from keywise_turn_keys as k where k.function = _f and k.key = over.key and k.token = over.token
    );
end $$;
create function keywise_turn_guard_1(_f integer, _tokens bigint[]) returns void language plpgsql as $$
declare
    -- In the same order everywhere, so that no two wait for each other.
    _numbers bigint[] := array(
        select distinct keywise_turn_number_1(_f, key) as number from keywise_turn_keys
        where function = _f and token = any(_tokens) and token != 0 order by 1
    );
begin
    perform pg_advisory_xact_lock(number) from unnest(_numbers) as number;
exception when lock_not_available then
    -- A function that was not run in transactions before had its locks in sessions of their own.
    if not coalesce((select bool_or(keywise_turn_unseat_1(number)) from unnest(_numbers) as number), false) then
        raise;
    end if;
    perform pg_advisory_xact_lock(number) from unnest(_numbers) as number;
end $$;
"""
