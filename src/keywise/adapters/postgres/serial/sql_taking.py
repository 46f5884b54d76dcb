"""The steps that give turns and take them back, as functions of the server, made of those in `postgres_turns_steps`."""

# The sessions in which an owner has a transaction with turns, and how they are named; `session_name` says the same.
SESSIONS = """
create function keywise_turn_end_sessions_1(_f integer, _owners text[]) returns void language plpgsql as $$
begin
    -- What it has not committed is undone, and all its locks are free.
    perform pg_terminate_backend(a.pid) from pg_stat_activity as a join unnest(_owners) as one (owner)
    on a.application_name =
        format('keywise turn %s %s', _f, left(encode(sha256(convert_to(one.owner, 'UTF8')), 'hex'), 16))
    where a.datname = current_database();
exception when insufficient_privilege then
    -- They are of another user of the database, and end when the server has waited for long enough.
    return;
end $$;
"""

TAKE = """
create function keywise_turn_free_lost_1(
    _f integer, _now float8, _attempts_max integer, _causes text[]
) returns bytea[] language plpgsql as $$
declare
    _dead text[];
    _key keywise_turn_keys;
    _work keywise_turn_work;
    _again integer;
    _touched bytea[] := '{}';
begin
    select array_agg(owner) into _dead from keywise_turn_owners where function = _f and alive_until <= _now;
    if _dead is null then
        return _touched;
    end if;
    if exists (select from keywise_turn_keys where function = _f and token != 0 and owner = any(_dead)) then
        perform keywise_turn_end_sessions_1(_f, _dead);
    end if;
    for _key in
        select * from keywise_turn_keys where function = _f and token != 0 and owner = any(_dead)
        order by key for update skip locked
    loop
        select count(*) filter (where keywise_turn_lose_1(w, _now, _attempts_max, _causes))
        into _again from keywise_turn_work as w
        where w.function = _f and w.key = _key.key and w.token = _key.token;
        update keywise_turn_keys set token = 0, owner = '', turns = 0, waiting = waiting + _again
        where function = _f and key = _key.key;
        _touched := _touched || _key.key;
    end loop;
    for _work in
        select * from keywise_turn_work where function = _f and mode = 'observe' and owner = any(_dead)
        order by key, place
    loop
        perform from keywise_turn_keys where function = _f and key = _work.key for update skip locked;
        continue when not found;
        perform keywise_turn_lose_1(_work, _now, 0, _causes);
        _touched := _touched || _work.key;
    end loop;
    -- Who has no row is not alive. Those that hold something still are found by theirs.
    delete from keywise_turn_owners where function = _f and owner = any(array(
        select o.owner from keywise_turn_owners as o
        where o.function = _f and o.owner = any(_dead) and o.alive_until <= _now and not exists (
            select from keywise_turn_keys as k where k.function = _f and k.token != 0 and k.owner = o.owner
        ) and not exists (
            select from keywise_turn_work as w where w.function = _f and w.mode = 'observe' and w.owner = o.owner
        ) for update skip locked
    ));
    return _touched;
end $$;
create function keywise_turn_is_observed_1(_f integer, _now float8, _key bytea, _causes text[])
returns boolean language plpgsql as $$
declare
    _work keywise_turn_work;
begin
    for _work in
        select * from keywise_turn_work where function = _f and key = _key and mode = 'observe' order by place
    loop
        if exists (
            select from keywise_turn_owners where function = _f and owner = _work.owner and alive_until > _now
        ) then
            return true;
        end if;
        perform keywise_turn_end_sessions_1(_f, array[_work.owner]);
        perform keywise_turn_lose_1(_work, _now, 0, _causes);
    end loop;
    return false;
end $$;
create function keywise_turn_take_1(
    _f integer, _me text, _now float8, _atomic boolean, _attempts_max integer, _causes text[],
    _limit integer, _run_max integer, _touched bytea[], _is_news boolean
) returns setof keywise_turn_row language plpgsql as $$
declare
    _alive text[];
    _key bytea;
    _work keywise_turn_work;
    _cause text;
    _ended integer;
    _places bigint[];
    _left integer := _limit;
    _token bigint;
    _freed bytea[] := keywise_turn_free_lost_1(_f, _now, _attempts_max, _causes);
begin
    _touched := _touched || _freed;
    _is_news := _is_news or cardinality(_freed) > 0;
    select array_agg(owner) into _alive from keywise_turn_owners where function = _f and alive_until > _now;
    for _key in
        select k.key from keywise_turn_keys as k cross join lateral (
            select w.runner, w.deadline, w.asked_at from keywise_turn_work as w
            where w.function = _f and w.key = k.key and w.token = 0 order by w.place limit 1
        ) as head
        where k.function = _f and k.token = 0 and k.waiting > 0 and (
            head.runner in ('', _me) or head.deadline <= _now or not coalesce(head.runner = any(_alive), false)
        )
        order by k.served, head.asked_at, k.key
    loop
        exit when _left <= 0;
        perform from keywise_turn_keys where function = _f and key = _key and token = 0 and waiting > 0
        for update skip locked;
        -- If somebody else is at it, it is his, or he tells when he is done.
        continue when not found;
        _touched := _touched || _key;
        continue when keywise_turn_is_observed_1(_f, _now, _key, _causes);
        _ended := 0;
        _places := '{}';
        for _work in
            select * from keywise_turn_work where function = _f and key = _key and token = 0 order by place
        loop
            _cause := case when _work.deadline <= _now then _causes[1]
                when _work.runner != '' and not coalesce(_work.runner = any(_alive), false) then _causes[2] end;
            if _cause is not null then
                perform keywise_turn_end_1(_f, _now, _key, _work.place, 'expired', _cause);
                _ended := _ended + 1;
                _is_news := _is_news or _work.caller != _me;
            elsif cardinality(_places) < least(_run_max, _left) and _work.runner in ('', _me) then
                _places := _places || _work.place;
            else
                exit;
            end if;
        end loop;
        if cardinality(_places) > 0 then
            _token := keywise_turn_token_1();
            return query with begun as (
                update keywise_turn_work set
                    token = _token, owner = _me, attempts = attempts + 1, started_at = _now, atomic = _atomic
                where function = _f and key = _key and place = any(_places) returning *
            )
            select 'turn', 0, begun::keywise_turn_work, null::text, null::bytea, null::text, null::bigint
            from begun order by begun.place;
            update keywise_turn_keys set token = _token, served = _token, owner = _me, turns = cardinality(_places),
                waiting = waiting - _ended - cardinality(_places)
            where function = _f and key = _key;
            _left := _left - cardinality(_places);
        elsif _ended > 0 then
            update keywise_turn_keys set waiting = waiting - _ended where function = _f and key = _key;
        end if;
    end loop;
    perform keywise_turn_tell_1(_f, _me, _touched, _is_news);
end $$;
"""

STEP = """
create type keywise_turn_terms as (
    owner text, lease_s float8, atomic boolean, attempts_max integer, causes text[],
    switches bigint, repeats boolean, "limit" integer, run_max integer
);
create function keywise_turn_step_1(
    _f integer, _terms keywise_turn_terms, _replies keywise_turn_reply[], _requests keywise_turn_request[]
) returns setof keywise_turn_row language plpgsql as $$
declare
    _me text := _terms.owner;
    _now float8;
    _touched bytea[] := '{}';
    _asked bytea[] := array(select distinct key from unnest(_requests));
    _is_news boolean := false;
    _refused bytea[];
begin
    if cardinality(_requests) > 0 and exists (
        select from keywise_functions where id = _f and switches != _terms.switches
    ) then
        return next row('old switches', 0, null, null, null, null, null)::keywise_turn_row;
        return;
    end if;
    if exists (select from unnest(_requests) where within is not null) then
        -- From within turns nobody else asks meanwhile, so that one of two sees the circle that both make.
        perform pg_advisory_xact_lock(x'6B657977'::integer, -1);
    end if;
    if cardinality(_replies) + cardinality(_requests) > 0 then
        perform keywise_turn_lock_1(_f, _asked, array(select id from unnest(_replies)));
    end if;
    _now := extract(epoch from clock_timestamp())::float8;
    if _terms.repeats then
        perform keywise_turn_live_1(_f, _me, _now + _terms.lease_s);
    elsif _terms."limit" > 0 then
        -- In a transaction that may stay open, and must not hold up renewals: there only has to be a row.
        insert into keywise_turn_owners (function, owner, alive_until) values (_f, _me, _now + _terms.lease_s)
        on conflict do nothing;
    end if;
    if not _terms.repeats then
        -- What is locked from here on others may have to wait for, and there is nothing left to do but to commit.
        perform set_config(
            'idle_in_transaction_session_timeout', (least(_terms.lease_s, 10) * 1000)::integer::text, true)
        where current_setting('idle_in_transaction_session_timeout')::interval
            not between interval '1 ms' and make_interval(secs => least(_terms.lease_s, 10));
    end if;
    if cardinality(_replies) > 0 then
        select * into _touched, _is_news, _refused
        from keywise_turn_answer_1(_f, _me, _now, _replies, _terms.repeats);
        return query select 'refused', 0, null::keywise_turn_work, null::text, one.id, null::text, null::bigint
        from unnest(_refused) with ordinality as one (id, n) order by n;
    end if;
    if cardinality(_requests) > 0 then
        return query select * from keywise_turn_ask_1(_f, _me, _now, _requests);
    end if;
    _touched := coalesce(_touched, '{}') || _asked;
    _is_news := coalesce(_is_news, false);
    if _terms."limit" > 0 then
        return query select * from keywise_turn_take_1(
            _f, _me, _now, _terms.atomic, _terms.attempts_max, _terms.causes, _terms."limit", _terms.run_max,
            _touched, _is_news);
    else
        perform keywise_turn_tell_1(_f, _me, _touched, _is_news);
    end if;
end $$;
"""

BACK = """
create function keywise_turn_give_back_1(
    _f integer, _me text, _now float8, _ids bytea[], _tokens bigint[], _causes text[]
) returns void language plpgsql as $$
declare
    _work keywise_turn_work;
    _touched bytea[] := '{}';
begin
    -- Their keys are locked. They were not begun, so that the turn does not count.
    for _work in
        select w.* from unnest(_ids, _tokens) as one (id, token) join keywise_turn_work as w
        on w.function = _f and w.id = one.id and w.token = one.token and w.token != 0
        where w.id = any(_ids)
    loop
        _touched := _touched || _work.key;
        if _work.mode = 'observe' then
            perform keywise_turn_end_1(_f, _now, _work.key, _work.place, 'expired', _causes[2]);
        else
            update keywise_turn_work set token = 0, owner = '', attempts = attempts - 1, started_at = 0, atomic = false
            where function = _f and key = _work.key and place = _work.place;
            update keywise_turn_keys set
                waiting = waiting + 1,
                turns = case when token = _work.token then turns - 1 else turns end,
                owner = case when token = _work.token and turns = 1 then '' else owner end,
                token = case when token = _work.token and turns = 1 then 0 else token end
            where function = _f and key = _work.key;
        end if;
    end loop;
    perform keywise_turn_tell_1(_f, _me, _touched, false);
end $$;
create function keywise_turn_back_1(_f integer, _terms keywise_turn_terms, _ids bytea[], _tokens bigint[])
returns void language plpgsql as $$
declare
    _now float8;
begin
    perform keywise_turn_lock_1(_f, '{}', _ids);
    _now := extract(epoch from clock_timestamp())::float8;
    perform keywise_turn_live_1(_f, _terms.owner, _now + _terms.lease_s);
    perform keywise_turn_give_back_1(_f, _terms.owner, _now, _ids, _tokens, _terms.causes);
end $$;
create function keywise_turn_renew_1(_f integer, _terms keywise_turn_terms, _tokens bigint[], _before float8)
returns setof bigint language plpgsql as $$
declare
    _me text := _terms.owner;
    _mine bigint[];
    _unknown bytea[];
    _their bigint[];
    _now float8 := extract(epoch from clock_timestamp())::float8;
begin
    perform keywise_turn_live_1(_f, _me, _now + _terms.lease_s);
    select array_agg(w.token), array_agg(w.id) filter (where w.token != all(_tokens) and w.started_at < _before),
        array_agg(w.token) filter (where w.token != all(_tokens) and w.started_at < _before)
    into _mine, _unknown, _their from (
        select one.* from keywise_turn_keys as k join keywise_turn_work as one
        on one.function = _f and one.key = k.key and one.token = k.token
        where k.function = _f and k.token != 0 and k.owner = _me
        union all
        select * from keywise_turn_work where function = _f and mode = 'observe' and owner = _me
    ) as w;
    if _unknown is not null then
        perform keywise_turn_lock_1(_f, '{}', _unknown);
        perform keywise_turn_give_back_1(_f, _me, _now, _unknown, _their, _terms.causes);
    end if;
    return query select token from unnest(_tokens) as token where token != all(coalesce(_mine, '{}'));
end $$;
create function keywise_turn_withdraw_1(
    _f integer, _terms keywise_turn_terms, _ids bytea[], _outcome text, _cause text
) returns setof bytea language plpgsql as $$
declare
    _now float8;
    _touched bytea[];
    _ended bytea[];
    _is_news boolean;
begin
    perform keywise_turn_lock_1(_f, '{}', _ids);
    _now := extract(epoch from clock_timestamp())::float8;
    perform keywise_turn_live_1(_f, _terms.owner, _now + _terms.lease_s);
    with gone as (
        delete from keywise_turn_work where function = _f and id = any(_ids) and token = 0 returning *
    ), kept as (
        insert into keywise_turn_completed select gone.*, _now, _outcome, '', _cause, 0 from gone
    )
    select array_agg(key), array_agg(id), bool_or(caller != _terms.owner) into _touched, _ended, _is_news from gone;
    if _ended is null then
        return;
    end if;
    update keywise_turn_keys as k set waiting = k.waiting - gone.requests
    from (select key, count(*)::integer as requests from unnest(_touched) as one (key) group by key) as gone
    where k.function = _f and k.key = any(_touched) and k.key = gone.key;
    perform keywise_turn_tell_1(_f, _terms.owner, _touched, _is_news);
    return query select unnest(_ended);
end $$;
"""

TAKING = SESSIONS + TAKE + STEP + BACK
