"""The scripts of turns in a Redis server: one call of an owner each, and those of operators."""

from keywise.adapters.redis.script import Script
from keywise.adapters.redis.serial.lua import ASKING, READING, STEP, TAKING

_EXCHANGE = (
    STEP
    + ASKING
    + TAKING
    + """
local replies, requests, version, limit, run_max = unpack(given)
if #requests > 0 and version ~= tonumber(meta[4] or 0) then return {'switches'} end
local refused, answers, turns = {}, {}, {}
for _, reply in ipairs(replies) do
  local id, outcome, body, cause, token = unpack(reply)
  local one = found(id)
  if one and one.outcome then
    local stored = reply_to(one.n)
    if token == '' or stored[2] ~= outcome or stored[3] ~= body or stored[4] ~= cause or stored[5] ~= token then
      refused[#refused + 1] = id
    end
  elseif one and token ~= '' and one.token == token then
    end_turn(one)
    finish(one, outcome, body, cause, token)
  else
    refused[#refused + 1] = id
  end
end
settle()
for at, request in ipairs(requests) do answers[at] = ask(request) end
if limit > 0 then turns = take(limit, run_max) end
ring()
return {'done', seq, refused, answers, turns}
"""
)
EXCHANGE = Script(_EXCHANGE)
"""Answer, ask and take. Given: replies, requests, the version of the switches that the caller knows, how many turns,
and how many in a row."""
EXCHANGE_FREEING = Script(_EXCHANGE, frees=True)
"""The same without requests: what has begun can be answered also when all memory that Redis may use is used."""

GIVE_BACK = Script(
    STEP
    + """
for _, turn in ipairs(given) do
  local one = found(turn[1])
  if one and not one.outcome and one.token == turn[2] then give_back(one) end
end
ring()
return {'done', seq}
""",
    frees=True,
)
"""Given: id and token of each turn."""

RENEW = Script(
    STEP
    + """
local tokens, before = unpack(given)
local named, mine, lost = {}, {}, {}
for _, token in ipairs(tokens) do named[token] = true end
for _, n in ipairs(call('SMEMBERS', P .. 'owned:' .. owner)) do
  local one = look(n)
  mine[one.token] = true
  if before and one.started < before and not named[one.token] then give_back(one) end
end
for at, token in ipairs(tokens) do
  if not mine[token] then lost[#lost + 1] = at - 1 end
end
ring()
return {'done', seq, lost}
""",
    frees=True,
)
"""Given: tokens, and a moment or nothing. Told: the positions of tokens that are not the owner's any more."""

WITHDRAW = Script(
    STEP
    + """
local ids, outcome, cause = unpack(given)
local ended = {}
for _, id in ipairs(ids) do
  local one = found(id)
  if one and not one.outcome and one.token == '' then
    leave_line(one)
    finish(one, outcome, '', cause, '')
    ended[#ended + 1] = id
  end
end
ring()
return {'done', seq, ended}
""",
    frees=True,
)

REPLIES = Script(
    STEP
    + """
local replies = {}
for at, id in ipairs(given) do
  local n = call('HGET', P .. 'ids', id)
  replies[at] = n and reply_to(n) or false
end
return {'done', seq, replies}
""",
    frees=True,
)

# Operators, and whoever comes.

_PLAIN = "local P = ARGV[1]\n" + READING

OPEN = Script(
    _PLAIN
    + """
local owner, fresh, form, nonce, own, quiet, most = unpack(ARGV, 2)
local meta = call('HMGET', P .. 'meta', 'nonce', 'quiet')
if not meta[1] then
  call('HSET', P .. 'meta', 'format', form, 'nonce', fresh)
  call('HSETNX', P .. 'meta', 'seq', own)
end
if nonce ~= '' then
  -- Once for each loss: whoever finds it later meets another name, and that it was noted.
  if meta[1] == nonce then call('HSET', P .. 'meta', 'nonce', fresh) end
  if meta[1] == nonce or not meta[2] then
    local time = call('TIME')
    local till = tonumber(time[1]) + tonumber(time[2]) / 1000000 + tonumber(quiet)
    call('HSET', P .. 'meta', 'quiet', string.format('%.6f', till))
  end
  if tonumber(call('HGET', P .. 'meta', 'seq')) < tonumber(own) then call('HSET', P .. 'meta', 'seq', own) end
  call('ZADD', P .. 'calls', call('HGET', P .. 'meta', 'seq'), owner)
end
local last = -1 - tonumber(most)
local gone = call('ZRANGE', P .. 'calls', last, last, 'WITHSCORES')
if #gone > 0 then
  call('HSET', P .. 'meta', 'forgotten', gone[2])
  call('ZREMRANGEBYRANK', P .. 'calls', 0, last)
end
return call('HMGET', P .. 'meta', 'format', 'nonce', 'seq')
""",
    frees=True,
)
"""What holds for a function, which is made if it is new. ARGV: prefix, owner, a fresh name, format; of who has found
a loss the name and number that it knew, and how long no turns are given; of how many owners the numbers are kept."""

SWITCHES = Script(
    _PLAIN + "return {tonumber(call('HGET', P .. 'meta', 'switches') or 0), call('HVALS', P .. 'switches')}", frees=True
)

SWITCH = Script(
    _PLAIN
    + """
if ARGV[3] == '' then call('HDEL', P .. 'switches', ARGV[2]) else call('HSET', P .. 'switches', ARGV[2], ARGV[3]) end
call('HINCRBY', P .. 'meta', 'switches', 1)
call('PUBLISH', P .. 'news:', '')
return {1}
""",
    frees=True,
)
"""ARGV: prefix, for which keys, and the switch, or nothing to remove it."""

STATES = Script(
    _PLAIN
    + """
local states = {}
for _, key in ipairs(call('ZRANGE', P .. 'open', 0, tonumber(ARGV[2]) - 1)) do
  local line, since = P .. 'line:' .. key, nil
  local running = call('ZRANGE', P .. 'runs:' .. key, 0, -1)
  for _, n in ipairs(call('ZRANGE', P .. 'observed:' .. key, 0, -1)) do running[#running + 1] = n end
  for _, n in ipairs(running) do
    local started = call('HGET', record(n), 'started')
    if not since or tonumber(started) < tonumber(since) then since = started end
  end
  if not since then since = call('HGET', record(call('ZRANGE', line, 0, 0)[1]), 'asked') end
  local hold = call('HGET', P .. 'holds', key) or ''
  states[#states + 1] = {key, call('ZCARD', line), #running, string.match(hold, ' (.*)') or '', since,
      tonumber(call('HGET', P .. 'overlaps', key) or 0)}
end
return states
""",
    frees=True,
)

HISTORY = Script(
    _PLAIN
    + """
local records, key = {}, ARGV[4]
local name = ARGV[3] == '' and 'history' or 'kept:' .. key
for at, place in ipairs(call('ZREVRANGE', P .. name, 0, tonumber(ARGV[2]) - 1)) do
  local of = ARGV[3] == '' and string.sub(place, 17) or key
  records[at] = whole(tonumber(string.sub(place, 1, 16)) .. ':' .. of)
end
return records
""",
    frees=True,
)
"""ARGV: prefix, how many at the most, whether of one key, and of which."""

RECORD = Script(
    _PLAIN
    + """
local n = call('HGET', P .. 'ids', ARGV[2])
return n and {whole(n)} or {}
""",
    frees=True,
)

PRUNE = Script(
    _PLAIN
    + """
local gone = call('ZRANGEBYSCORE', P .. 'ended', '-inf', ARGV[2], 'LIMIT', 0, ARGV[3])
for _, n in ipairs(gone) do
  local one = call('HMGET', record(n), 'id', 'key', 'place', 'overlaps')
  local place = string.format('%016d', one[3])
  if call('HGET', P .. 'ids', one[1]) == n then call('HDEL', P .. 'ids', one[1]) end
  if one[4] ~= '0' and call('HINCRBY', P .. 'overlaps', one[2], -1) == 0 then call('HDEL', P .. 'overlaps', one[2]) end
  call('ZREM', P .. 'history', place .. one[2])
  call('ZREM', P .. 'kept:' .. one[2], place)
  call('ZREM', P .. 'ended', n)
  call('DEL', record(n))
end
return {#gone}
""",
    frees=True,
)
"""ARGV: prefix, the last moment at which they ended, how many at the most."""
