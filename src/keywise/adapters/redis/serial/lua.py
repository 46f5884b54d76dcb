"""What runs inside a Redis server for turns: the steps of `turnkeeping`, each in one call and at one moment.

What is kept of a request is a hash of its own, named by its place and key; the rest are indexes of these names.
All names of all functions begin with one tag, since circles may go over several functions.
Tokens stay texts, because Lua has no numbers of 64 bits.
"""

import json

from keywise.core.serial import rules

TAG = "keywise:turns:{all}:"
FIELDS = (
    *("id", "key", "body", "runner", "mode", "more", "place", "asked", "deadline"),
    *("token", "owner", "attempts", "overlaps", "started", "atomic"),
    *("ended", "outcome", "reply", "cause", "reply_token"),
)
"""Of a request; the last five are there once it has ended, the last four being its reply."""


def prefix_of(function: str) -> str:
    """What the names of a function begin with; its length keeps two functions apart whatever their names are."""
    return f"{TAG}{len(function.encode())}:{function}:"


_CONSTANTS = f"""
local TAG = '{TAG}'
local FIELDS = {{{", ".join(f"'{field}'" for field in FIELDS)}}}
local TOO_LATE, CALLER_GONE = {json.dumps(rules.TOO_LATE)}, {json.dumps(rules.CALLER_GONE)}
local HOLDER_LOST, LOST_AGAIN = {json.dumps(rules.HOLDER_LOST)}, {json.dumps(rules.LOST_AGAIN)}
"""

READING = (
    _CONSTANTS
    + """
local call = redis.call
local function number(text) return text == 'inf' and math.huge or tonumber(text) end
local function record(n) return P .. 'record:' .. n end
local function whole(n) return call('HMGET', record(n), unpack(FIELDS)) end
local function reply_to(n)
  local told = call('HMGET', record(n), 'outcome', 'reply', 'cause', 'reply_token')
  return told[1] and {'reply', told[1], told[2], told[3], told[4]}
end
"""
)

# A worker that knows of more than the server does has found that something was lost; then nothing is done at all.
STEP = (
    """
local terms, given = cmsgpack.unpack(ARGV[1]), cmsgpack.unpack(ARGV[2])
local P, nonce, owner, own, lease, atomic, attempts_max, salt, name = unpack(terms)
"""
    + READING
    + """
local meta = call('HMGET', P .. 'meta', 'nonce', 'forgotten', 'quiet', 'switches')
local known = call('ZSCORE', P .. 'calls', owner) or meta[2]
if meta[1] ~= nonce or (own > 0 and (not known or tonumber(known) < own)) then return {'lost'} end
local time = call('TIME')
local micros = tonumber(time[1]) * 1000000 + tonumber(time[2])
local stamp = string.format('%.6f', micros / 1000000)
local now = tonumber(stamp)
local seq = call('HINCRBY', P .. 'meta', 'seq', 1)
call('ZADD', P .. 'calls', seq, owner)
call('ZADD', P .. 'owners', string.format('%.6f', now + lease), owner)

local touched, heads, told, living = {}, {}, {}, {}
local function alive(who)
  if living[who] == nil then
    local till = call('ZSCORE', P .. 'owners', who)
    living[who] = till and now < tonumber(till) or false
  end
  return living[who]
end
local function look(n)
  local got = call('HMGET', record(n), 'id', 'key', 'place', 'token', 'owner', 'attempts', 'deadline', 'mode',
      'within', 'outcome', 'runner', 'joined', 'started', 'atomic')
  return {n = n, id = got[1], key = got[2], place = got[3], token = got[4], owner = got[5], attempts = tonumber(got[6]),
      deadline = number(got[7]), mode = got[8], within = got[9], outcome = got[10], runner = got[11], joined = got[12],
      started = tonumber(got[13]), atomic = got[14] == '1'}
end
local function found(id)
  local n = call('HGET', P .. 'ids', id)
  return n and look(n)
end

-- After changes of a key: whether it is free, who is next, and how many wait.
local function settle()
  for key in pairs(touched) do
    local waiting, running = call('ZCARD', P .. 'line:' .. key), call('ZCARD', P .. 'runs:' .. key)
    if running == 0 then call('HDEL', P .. 'holds', key) end
    heads[key] = nil
    if waiting > 0 and running == 0 then
      local first = call('ZRANGE', P .. 'line:' .. key, 0, 0)[1]
      local head = call('HMGET', record(first), 'runner', 'asked')
      heads[key] = head[1]
      -- Keys that never had a turn go before all others, by when their first request came.
      local since = math.floor(tonumber(head[2]) * 1000000 + 0.5) - 2^53
      call('ZADD', P .. 'free', call('HGET', P .. 'served', key) or string.format('%.0f', since), key)
    else
      call('ZREM', P .. 'free', key)
    end
    if waiting + running + call('ZCARD', P .. 'observed:' .. key) > 0 then
      call('ZADD', P .. 'open', -waiting, key)
    else
      call('ZREM', P .. 'open', key)
    end
  end
  touched = {}
end
-- Wake up those who may wait for what happened: the next runners of keys, and those whose requests ended.
local function ring()
  settle()
  for _, runner in pairs(heads) do told[runner] = true end
  for runner in pairs(told) do
    if runner ~= owner then call('PUBLISH', P .. 'news:' .. runner, '') end
  end
end

local function wait_in_line(n, key, place)
  touched[key] = true
  call('ZADD', P .. 'line:' .. key, place, n)
end
-- It is waited for from within turns, until it ends.
local function nest(n, key, within)
  for token in string.gmatch(within, '%S+') do
    call('ZADD', TAG .. 'within:' .. token, 0, cmsgpack.pack({name, key, n}))
  end
end
local function leave_line(one)
  touched[one.key] = true
  call('ZREM', P .. 'line:' .. one.key, one.n)
end
local function end_turn(one)
  touched[one.key] = true
  call('ZREM', P .. (one.mode == 'observe' and 'observed:' or 'runs:') .. one.key, one.n)
  call('SREM', P .. 'owned:' .. one.owner, one.n)
end
local function finish(one, outcome, body, cause, token)
  call('HSET', record(one.n), 'outcome', outcome, 'reply', body, 'cause', cause, 'reply_token', token, 'ended', stamp)
  call('ZADD', P .. 'ended', stamp, one.n)
  for token in string.gmatch(one.within, '%S+') do
    call('ZREM', TAG .. 'within:' .. token, cmsgpack.pack({name, one.key, one.n}))
  end
  told[one.joined and '' or one.runner] = true
end
local function wait_again(one, attempts)
  call('HSET', record(one.n), 'token', '', 'owner', '', 'started', '0', 'attempts', attempts, 'atomic', '0')
  wait_in_line(one.n, one.key, one.place)
end
local function next_token()
  local last = tonumber(call('GET', TAG .. 'token') or 0)
  local base = string.format('%.0f', math.max(last + 1, micros))
  call('SET', TAG .. 'token', base)
  return base .. ':' .. salt
end
local function lose(one)
  end_turn(one)
  if not one.atomic or one.mode == 'observe' then
    finish(one, 'lost', '', HOLDER_LOST, '')
  elseif now >= one.deadline then
    finish(one, 'expired', '', TOO_LATE, '')
  elseif one.attempts >= attempts_max then
    finish(one, 'failed', '', string.format(LOST_AGAIN, one.attempts), '')
  else
    wait_again(one, one.attempts)
  end
end
local function give_back(one)
  end_turn(one)
  if one.mode == 'observe' then
    finish(one, 'expired', '', CALLER_GONE, '')
  else
    wait_again(one, one.attempts - 1)
  end
end
"""
)

ASKING = """
local function holders(other, key)
  local theirs, tokens = TAG .. #other .. ':' .. other .. ':', {}
  local hold = call('HGET', theirs .. 'holds', key)
  if hold then tokens[1] = string.match(hold, '^%S+') end
  for _, n in ipairs(call('ZRANGE', theirs .. 'observed:' .. key, 0, -1)) do
    tokens[#tokens + 1] = call('HGET', theirs .. 'record:' .. n, 'token')
  end
  return tokens
end
local function by_name(a, b)
  for at = 1, 3 do
    if a[at] ~= b[at] then return a[at] < b[at] end
  end
  return false
end
-- As `circle` of the rules.
local function circle(key, within, turn)
  local mine, seen, paths, turns, at = {}, {}, {{name, key}}, {turn}, 1
  for token in string.gmatch(within, '%S+') do mine[token] = true end
  while paths[at] do
    local path, wishes = paths[at], {}
    local tokens = turns[at] ~= '' and {turns[at]} or holders(path[#path - 1], path[#path])
    for _, token in ipairs(tokens) do
      if mine[token] then return path end
    end
    for _, token in ipairs(tokens) do
      for _, packed in ipairs(seen[token] and {} or call('ZRANGE', TAG .. 'within:' .. token, 0, -1)) do
        local wish = cmsgpack.unpack(packed)
        wish[3] = call('HGET', TAG .. #wish[1] .. ':' .. wish[1] .. ':record:' .. wish[3], 'token') or ''
        wishes[#wishes + 1] = wish
      end
      seen[token] = true
    end
    table.sort(wishes, by_name)
    for _, wish in ipairs(wishes) do
      local further = {unpack(path)}
      further[#further + 1] = wish[1]
      further[#further + 1] = wish[2]
      paths[#paths + 1] = further
      turns[#turns + 1] = wish[3]
    end
    at = at + 1
  end
end
local function enter(one)
  local id, key, body, runner, mode, more, wait, within = unpack(one, 1, 8)
  local place = call('HINCRBY', P .. 'places', key, 1)
  local n, asked = place .. ':' .. key, string.format('%.0f', now * 1000000)
  call('HSET', record(n), 'id', id, 'key', key, 'body', body, 'runner', runner, 'mode', mode, 'more', more,
      'place', place, 'asked', stamp, 'deadline', string.format('%.6f', now + wait), 'within', within,
      'token', '', 'owner', '', 'attempts', '0', 'overlaps', '0', 'started', '0')
  call('HSET', P .. 'ids', id, n)
  call('ZADD', P .. 'history', asked, string.format('%016d', place) .. key)
  call('ZADD', P .. 'kept:' .. key, asked, string.format('%016d', place))
  nest(n, key, within)
  return n, place
end
local function observe(one)
  local key, overlaps = one[2], 0
  for _, other in ipairs(call('ZRANGE', P .. 'observed:' .. key, 0, -1)) do
    if alive(call('HGET', record(other), 'owner')) then overlaps = overlaps + 1 end
  end
  local n, place = enter(one)
  call('HSET', record(n), 'token', next_token(), 'owner', owner, 'attempts', '1', 'overlaps', overlaps,
      'started', stamp)
  call('ZADD', P .. 'observed:' .. key, place, n)
  call('SADD', P .. 'owned:' .. owner, n)
  if overlaps > 0 then call('HINCRBY', P .. 'overlaps', key, 1) end
  touched[key] = true
  return {'turn', whole(n)}
end
local function ask(one)
  local id, key, body, mode, within = one[1], one[2], one[3], one[5], one[8]
  local n = call('HGET', P .. 'ids', id)
  if n then
    local was = call('HMGET', record(n), 'key', 'body', 'outcome', 'runner', 'token', 'within')
    if was[1] ~= key or was[2] ~= body then return {'clash', was[1]} end
    if not was[3] then
      local path = within ~= '' and circle(key, within, was[5])
      if path then return {'circle', path} end
      if within ~= '' then
        nest(n, key, within)
        call('HSET', record(n), 'within', was[6] .. ' ' .. within)
      end
      -- Its runner is told of the end, and this caller has to be, too.
      if was[4] ~= owner then call('HSET', record(n), 'joined', '1') end
      return false
    end
    if was[3] ~= 'expired' then return reply_to(n) end
  end
  local is = one[9] or mode
  if one[9] == 'on' and now < one[10] then is = 'observe' end
  if is == 'observe' and call('EXISTS', P .. 'line:' .. key, P .. 'runs:' .. key) > 0 then is = 'on' end
  if is ~= mode then return {'switched', is} end
  if mode == 'observe' then return observe(one) end
  local path = within ~= '' and circle(key, within, '')
  if path then return {'circle', path} end
  local entered, place = enter(one)
  wait_in_line(entered, key, place)
  return false
end
"""

TAKING = """
local PAGE = 32
local function free_lost()
  for _, who in ipairs(call('ZRANGEBYSCORE', P .. 'owners', '-inf', stamp)) do
    for _, n in ipairs(call('SMEMBERS', P .. 'owned:' .. who)) do
      lose(look(n))
    end
    call('ZREM', P .. 'owners', who)
  end
end
local function is_observed(key)
  for _, n in ipairs(call('ZRANGE', P .. 'observed:' .. key, 0, -1)) do
    local one = look(n)
    if alive(one.owner) then return true end
    lose(one)
  end
  return false
end
-- Of the line of a free key: those that end, with their causes, and those that this owner runs now.
local function run_of(key, most)
  local gone, run, start = {}, {}, 0
  while true do
    local page = call('ZRANGE', P .. 'line:' .. key, start, start + PAGE - 1)
    for _, n in ipairs(page) do
      local one = look(n)
      one.departs = (now >= one.deadline and TOO_LATE)
          or (one.runner ~= '' and not alive(one.runner) and CALLER_GONE)
      if one.departs then
        gone[#gone + 1] = one
      elseif #run < most and (one.runner == '' or one.runner == owner) then
        run[#run + 1] = one
      else
        return gone, run
      end
    end
    if #page < PAGE then return gone, run end
    start = start + PAGE
  end
end
local function take_key(key, most, turns)
  local gone, run = run_of(key, most)
  for _, one in ipairs(gone) do
    leave_line(one)
    finish(one, 'expired', '', one.departs, '')
  end
  if #run == 0 then return end
  local token = next_token()
  for _, one in ipairs(run) do
    leave_line(one)
    call('HSET', record(one.n), 'token', token, 'owner', owner, 'attempts', one.attempts + 1, 'started', stamp,
        'atomic', atomic and '1' or '0')
    call('ZADD', P .. 'runs:' .. key, one.place, one.n)
    call('SADD', P .. 'owned:' .. owner, one.n)
    turns[#turns + 1] = whole(one.n)
  end
  call('HSET', P .. 'holds', key, token .. ' ' .. owner)
  call('HSET', P .. 'served', key, call('HINCRBY', P .. 'meta', 'served', 1))
end
local function take(limit, run_max)
  local turns, start = {}, 0
  if meta[3] and now < tonumber(meta[3]) then return turns end
  free_lost()
  settle()
  while #turns < limit do
    -- Nothing leaves this index before the next `settle`, so that pages fit together.
    local page = call('ZRANGE', P .. 'free', start, start + PAGE - 1)
    for _, key in ipairs(page) do
      if #turns >= limit then break end
      if not is_observed(key) then take_key(key, math.min(run_max, limit - #turns), turns) end
    end
    if #page < PAGE then break end
    start = start + PAGE
  end
  return turns
end
"""
