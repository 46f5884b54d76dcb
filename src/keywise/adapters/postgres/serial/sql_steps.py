"""The steps on the tables of turns, as functions of the server: each is one round trip, and one transaction by itself.

They say the same as `turnkeeping`. What a call names is locked at once and in the order of keys; whatever else a step
finds to do is left to others if they are at it, so that steps never wait for each other in a circle. Each statement
of a function sees what was committed before it began, and so all that was done under a lock that was waited for.
A function that was released is never changed: another one gets the next number, since older processes call the old one.
"""

LOCK = """
create function keywise_turn_lock_1(_f integer, _keys bytea[], _ids bytea[]) returns void language sql as $$
    -- What is there is locked by the attempt to change it, and left as it is.
    insert into keywise_turn_keys as k (function, key)
    select _f, one.key from (
        select unnest(_keys) as key
        union select w.key from keywise_turn_work as w where w.function = _f and w.id = any(_ids)
    ) as one order by one.key
    on conflict (function, key) do update set place = k.place where false
$$;
"""

# One that ends is moved from one table to the other.
END = """
create function keywise_turn_end_1(
    _f integer, _now float8, _key bytea, _place bigint, _outcome text, _cause text
) returns text language sql as $$
    with gone as (
        delete from keywise_turn_work where function = _f and key = _key and place = _place returning *
    ), kept as (
        insert into keywise_turn_completed select gone.*, _now, _outcome, '', _cause, 0 from gone
    )
    select caller from gone
$$;
create function keywise_turn_lose_1(
    _work keywise_turn_work, _now float8, _attempts_max integer, _causes text[]
) returns boolean language plpgsql as $$
begin
    -- Whether it waits again; else it ends here.
    if not _work.atomic or _work.mode = 'observe' then
        perform keywise_turn_end_1(_work.function, _now, _work.key, _work.place, 'lost', _causes[3]);
    elsif _now >= _work.deadline then
        perform keywise_turn_end_1(_work.function, _now, _work.key, _work.place, 'expired', _causes[1]);
    elsif _work.attempts >= _attempts_max then
        perform keywise_turn_end_1(
            _work.function, _now, _work.key, _work.place, 'failed', format(_causes[4], _work.attempts));
    else
        update keywise_turn_work set token = 0, owner = '', started_at = 0, atomic = false
        where function = _work.function and key = _work.key and place = _work.place;
        return true;
    end if;
    return false;
end $$;
"""

TELL = """
create function keywise_turn_tell_1(_f integer, _me text, _touched bytea[], _is_news boolean)
returns void language plpgsql as $$
begin
    -- Others are told if they wait for a reply, or if a key is free whose next request they may run.
    if _is_news or exists (
        select from keywise_turn_keys as k cross join lateral (
            select w.runner from keywise_turn_work as w
            where w.function = _f and w.key = k.key and w.token = 0 order by w.place limit 1
        ) as head
        where k.function = _f and k.key = any(_touched) and k.token = 0 and k.waiting > 0 and head.runner != _me
    ) then
        perform pg_notify('keywise', 't' || _f || ' ' || _me);
    end if;
end $$;
"""

LIVE = """
create function keywise_turn_live_1(_f integer, _me text, _until float8) returns void language sql as $$
    insert into keywise_turn_owners as o (function, owner, alive_until) values (_f, _me, _until)
    on conflict (function, owner) do update set alive_until = excluded.alive_until
$$;
"""

# Ends requests that have the token of a reply; returns the keys that were touched, and whether others are to be told.
ANSWER = """
create type keywise_turn_reply as (
    id bytea, token bigint, outcome text, answer bytea, cause text
);
create function keywise_turn_answer_1(
    _f integer, _me text, _now float8, _replies keywise_turn_reply[], _repeats boolean,
    out _touched bytea[], out _is_news boolean, out _refused bytea[]
) language plpgsql as $$
declare
    _ids bytea[] := array(select id from unnest(_replies));
    _ended bytea[];
    _tokens bigint[];
begin
    with given as (
        select distinct on (id, token) * from unnest(_replies) with ordinality as one order by id, token, ordinality
    ), gone as (
        delete from keywise_turn_work as w using given as g
        where w.function = _f and w.id = any(_ids) and w.id = g.id and w.token = g.token and g.token != 0
        returning w.*, g.outcome, g.answer, g.cause
    ), kept as (
        insert into keywise_turn_completed
        select place, token, asked_at, deadline, wait_s, started_at, function, attempts, beside, atomic, mode,
            caller, runner, owner, asked_by, key, id, within, body, _now, outcome, answer, cause, token from gone
        returning key, id, token, caller
    )
    select array_agg(key), array_agg(id), array_agg(token), bool_or(caller != _me)
    into _touched, _ended, _tokens, _is_news from kept;
    update keywise_turn_keys as k set
        turns = k.turns - over.turns,
        token = case when k.turns > over.turns then k.token else 0 end,
        owner = case when k.turns > over.turns then k.owner else '' end
    from (
        select key, token, count(*)::integer as turns from unnest(_touched, _tokens) as one (key, token)
        group by key, token
    ) as over
    where k.function = _f and k.key = any(_touched) and k.key = over.key and k.token = over.token;
    _refused := array(
        select given.id from unnest(_replies) with ordinality as given
        where not coalesce(given.id = any(_ended), false) and not (_repeats and given.token != 0 and exists (
            select from (
                select * from keywise_turn_completed as c where c.function = _f and c.id = given.id
                order by c.place desc limit 1
            ) as last
            where (last.answer_token, last.outcome, last.answer, last.cause)
                = (given.token, given.outcome, given.answer, given.cause)
        ) and not exists (select from keywise_turn_work as w where w.function = _f and w.id = given.id))
        order by ordinality
    );
end $$;
"""

# Whoever holds a key waits for the holders of those that requests from within its turn wait for; as `rules.circle`.
CIRCLE = """
create function keywise_turn_circle_1(_f integer, _key bytea, _within bigint[], _turn bigint)
returns text language plpgsql as $$
declare
    _functions integer[] := array[_f];
    _keys bytea[] := array[_key];
    _turns bigint[] := array[_turn];
    _before integer[] := array[0];
    _at integer := 1;
    _tokens bigint[];
    _seen bigint[] := '{}';
    _path jsonb := '[]';
begin
    while _within is not null and _at <= cardinality(_keys) loop
        _tokens := case when _turns[_at] != 0 then array[_turns[_at]] else array(
            select token from keywise_turn_keys where function = _functions[_at] and key = _keys[_at] and token != 0
            union select token from keywise_turn_work
            where function = _functions[_at] and key = _keys[_at] and mode = 'observe'
        ) end;
        if _tokens && _within then
            while _at > 0 loop
                select jsonb_build_array(jsonb_build_array(name, encode(_keys[_at], 'hex'))) || _path into _path
                from keywise_functions where id = _functions[_at];
                _at := _before[_at];
            end loop;
            return _path;
        end if;
        _tokens := array(select unnest(_tokens) except select unnest(_seen));
        _seen := _seen || _tokens;
        select _functions || array_agg(function), _keys || array_agg(key), _turns || array_agg(token),
            _before || array_agg(_at)
        into _functions, _keys, _turns, _before from (
            select distinct w.function, f.name collate "C" as name, w.key, w.token from keywise_turn_work as w
            join keywise_functions as f on f.id = w.function
            where w.within is not null and w.within && _tokens order by name, w.key, w.token
        ) as further;
        _at := _at + 1;
    end loop;
    return null;
end $$;
"""

ASK = """
create type keywise_turn_request as (
    id bytea, key bytea, body bytea, asked_by text, runner text, wait_s float8, mode text,
    set_mode text, set_until float8, within bigint[]
);
create type keywise_turn_row as (
    what text, number integer, work keywise_turn_work, outcome text, answer bytea, cause text, answer_token bigint
);
create function keywise_turn_enter_1(
    _f integer, _me text, _now float8, _requests keywise_turn_request[]
) returns void language sql as $$
    with entered as (
        insert into keywise_turn_work (
            function, key, place, id, body, asked_by, caller, runner, wait_s, asked_at, deadline, mode, within
        )
        select _f, one.key, k.place + row_number() over (partition by one.key order by ordinality), one.id, one.body,
            one.asked_by, _me, one.runner, one.wait_s, _now, _now + one.wait_s, one.mode, one.within
        from unnest(_requests) with ordinality as one join keywise_turn_keys as k
        on k.function = _f and k.key = one.key
        returning key
    )
    update keywise_turn_keys as k set place = k.place + new.requests, waiting = k.waiting + new.requests
    from (select key, count(*)::integer as requests from entered group by key) as new
    where k.function = _f and k.key = new.key
$$;
create function keywise_turn_token_1() returns bigint language sql as $$
    select nextval('keywise_tokens') << 24 | floor(random() * 16777216)::bigint
$$;
create function keywise_turn_ask_1(
    _f integer, _me text, _now float8, _requests keywise_turn_request[]
) returns setof keywise_turn_row language plpgsql as $$
declare
    _one keywise_turn_request;
    _work keywise_turn_work;
    _last keywise_turn_completed;
    _mode text;
    _circle text;
    _number integer := 0;
begin
    if not exists (
        select from unnest(_requests) as one
        where one.mode != 'on' or one.set_mode is not null or one.within is not null
        or exists (select from keywise_turn_work as w where w.function = _f and w.id = one.id)
        or exists (select from keywise_turn_completed as c where c.function = _f and c.id = one.id)
    ) and (
        select count(distinct id) = count(*) from unnest(_requests)
    ) then
        perform keywise_turn_enter_1(_f, _me, _now, _requests);
        return;
    end if;
    foreach _one in array _requests loop
        _number := _number + 1;
        select * into _work from keywise_turn_work as w where w.function = _f and w.id = _one.id;
        if found then
            if (_work.key, _work.body) != (_one.key, _one.body) then
                return next row('clash', _number, _work, null, null, null, null)::keywise_turn_row;
                continue;
            end if;
            _circle := keywise_turn_circle_1(_f, _one.key, _one.within, _work.token);
            if _circle is not null then
                return next row('circle', _number, null, null, null, _circle, null)::keywise_turn_row;
            elsif _work.caller not in (_me, '*') or _one.within is not null then
                -- Two wait for its reply, in two processes or from within another turn.
                update keywise_turn_work as w set within = w.within || _one.within,
                    caller = case when w.caller = _me then _me else '*' end
                where w.function = _f and w.id = _one.id;
            end if;
            continue;
        end if;
        select * into _last from keywise_turn_completed as c where c.function = _f and c.id = _one.id
        order by c.place desc limit 1;
        if found then
            _work.key := _last.key;
            if (_last.key, _last.body) != (_one.key, _one.body) then
                return next row('clash', _number, _work, null, null, null, null)::keywise_turn_row;
                continue;
            elsif _last.outcome != 'expired' then
                return next row('reply', _number, null, _last.outcome, _last.answer, _last.cause, _last.answer_token
                    )::keywise_turn_row;
                continue;
            end if;
        end if;
        _mode := case when _one.set_mode = 'on' and _now < _one.set_until then 'observe'
            else coalesce(_one.set_mode, _one.mode) end;
        if _mode = 'observe' and exists (
            select from keywise_turn_work as w where w.function = _f and w.key = _one.key and w.mode != 'observe'
        ) then
            _mode := 'on';
        end if;
        if _mode != _one.mode then
            return next row('switched', _number, null, null, null, _mode, null)::keywise_turn_row;
        elsif _mode = 'observe' then
            update keywise_turn_keys as k set place = k.place + 1 where k.function = _f and k.key = _one.key;
            insert into keywise_turn_work (
                function, key, place, id, body, asked_by, caller, runner, wait_s, asked_at, deadline, mode, within,
                token, owner, attempts, started_at, beside
            )
            select _f, _one.key, k.place, _one.id, _one.body, _one.asked_by, _me, _one.runner, _one.wait_s, _now,
                _now + _one.wait_s, _mode, _one.within, keywise_turn_token_1(), _me, 1, _now, (
                    select count(*) from keywise_turn_work as w join keywise_turn_owners as o
                    on o.function = _f and o.owner = w.owner and o.alive_until > _now
                    where w.function = _f and w.key = _one.key and w.mode = 'observe'
                )
            from keywise_turn_keys as k where k.function = _f and k.key = _one.key
            returning * into _work;
            return next row('observed', _number, _work, null, null, null, null)::keywise_turn_row;
        else
            _circle := keywise_turn_circle_1(_f, _one.key, _one.within, 0);
            if _circle is not null then
                return next row('circle', _number, null, null, null, _circle, null)::keywise_turn_row;
            else
                perform keywise_turn_enter_1(_f, _me, _now, array[_one]);
            end if;
        end if;
    end loop;
end $$;
"""

STEPS = LOCK + END + TELL + LIVE + ANSWER + CIRCLE + ASK
