"""What runs inside a Redis server: reading and swapping the states of many keys in one step each.

The scripts know no rules. They compare bytes, keep the indexes of what was written, and tell the server's time.
Numbers that need all 64 bits stay bytes; those that Lua counts with stay below 2^53.
"""

import hashlib


class Script:
    """A script, and the name under which a server remembers it."""

    def __init__(self, body: str, *, frees: bool = False) -> None:
        flags = "#!lua flags=allow-oom\n" if frees else "#!lua\n"
        self.text = (flags + body).encode()
        self.sha = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


GIVEN = 6
"""How many arguments every guarded script begins with: prefix, nonce, worker, seen, own, ahead."""

# A worker that knows of more than the server does has found that something was lost; then nothing is done at all.
_GUARD = """
local P = ARGV[1]
local meta = redis.call('HMGET', P .. 'meta', 'nonce', 'seq')
local own = redis.call('ZSCORE', P .. 'workers', ARGV[3])
if not own and ARGV[5] ~= '0' then
  -- Of very many workers those that wrote last are kept; of the others it is known how far they had come.
  own = redis.call('HGET', P .. 'meta', 'forgotten')
end
if meta[1] ~= ARGV[2] or tonumber(meta[2]) < tonumber(ARGV[4])
    or (ARGV[5] ~= '0' and (not own or tonumber(own) < tonumber(ARGV[5]))) then
  return {'lost'}
end
local time = redis.call('TIME')
local seconds = tonumber(time[1]) + tonumber(time[2]) / 1000000 + tonumber(ARGV[6])
local function state_of(bucket, code)
  local active = redis.call('HGET', P .. 'active', code)
  if active then return 'a' .. active end
  local idle = redis.call('HGET', P .. bucket, code)
  if idle then return 'i' .. idle end
  return ''
end
"""

READ = Script(
    _GUARD
    + """
local first = ''
local count = tonumber(ARGV[7])
if count > 0 then
  local last = tonumber(redis.call('HGET', P .. 'meta', 'token') or 0)
  local start = math.max(last + 1, tonumber(time[1]) * 1000000 + tonumber(time[2]))
  redis.call('HSET', P .. 'meta', 'token', string.format('%.0f', start + count - 1))
  first = string.format('%.0f', start)
end
local states, rates = {}, {}
for at = 9, #ARGV, 2 do
  states[#states + 1] = state_of(ARGV[at], ARGV[at + 1])
  if ARGV[8] ~= '' then rates[#rates + 1] = redis.call('ZSCORE', P .. 'rates', ARGV[at + 1]) or '' end
end
return {time[1], time[2], meta[2], redis.call('GET', P .. 'controls') or '', first, states, rates}
""",
    frees=True,
)
"""Tokens and the states of keys. ARGV: how many tokens, whether rates too, then bucket and code of each key."""

_SWAP = (
    _GUARD
    + """
local controls = redis.call('GET', P .. 'controls') or ''
local fits = (ARGV[8] == '*' or ARGV[8] == '=' .. controls)
    and (ARGV[7] == '' or seconds - tonumber(ARGV[7]) <= tonumber(ARGV[9]))
local wrote, charged, changed = false, 0, {}
local function keep(more, at)
  while at <= #more do
    local letter
    letter, at = struct.unpack('>I4c0', more, at)
    local number = redis.call('HINCRBY', P .. 'meta', 'letters', 1)
    redis.call('HSET', P .. 'letters', number, letter)
    redis.call('ZADD', P .. 'buried', string.format('%.6f', seconds), string.format('%016d', number))
  end
end
local function index(name, score, code, was_active)
  if score ~= '' then
    redis.call('ZADD', P .. name, score, code)
  elseif was_active then
    redis.call('ZREM', P .. name, code)
  end
end
for at = 13, #ARGV, 7 do
  local bucket, code, expected, after = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local more = ARGV[at + 6]
  local keys, tombstones, suspects, rate_before, rate_after, letters = 0, 0, 0, '', '', 1
  if more ~= '' then
    keys, tombstones, suspects, rate_before, rate_after, letters = struct.unpack('>bbbBc0Bc0', more)
  end
  if bucket == '' then
    keep(more, letters)
    wrote = true
  else
    local current = state_of(bucket, code)
    local function rate() return redis.call('ZSCORE', P .. 'rates', code) or '' end
    if not fits or current ~= expected or (rate_after ~= '' and rate() ~= rate_before) then
      changed[#changed + 1] = (at - 13) / 7
      changed[#changed + 1] = current
      changed[#changed + 1] = rate()
    else
      wrote = true
      local was_active, kind = string.sub(current, 1, 1) == 'a', string.sub(after, 1, 1)
      if kind == 'a' then
        redis.call('HSET', P .. 'active', code, string.sub(after, 2))
      else
        if was_active then redis.call('HDEL', P .. 'active', code) end
        if kind == 'i' then
          local mark = string.sub(after, 2)
          if ARGV[10] ~= '' then
            mark = string.sub(mark, 1, 8) .. struct.pack('>I4', math.ceil(seconds)) .. string.sub(mark, 13)
          end
          redis.call('HSET', P .. bucket, code, mark)
        else
          redis.call('HDEL', P .. bucket, code)
        end
      end
      index('held', ARGV[at + 4], code, was_active)
      index('suspect', ARGV[at + 5], code, was_active)
      if keys ~= 0 then redis.call('HINCRBY', P .. 'meta', 'keys', keys) end
      if tombstones ~= 0 then redis.call('HINCRBY', P .. 'meta', 'tombstones', tombstones) end
      if suspects ~= 0 then redis.call('HINCRBY', P .. 'meta', 'suspects', suspects) end
      if rate_after ~= '' then
        redis.call('ZADD', P .. 'rates', rate_after, code)
        charged = charged + 1
      end
      keep(more, letters)
    end
  end
end
if charged > 0 and ARGV[12] ~= '' then
  -- Only what still limits a key is kept: more is swept than can have been added.
  local past = redis.call('ZRANGEBYSCORE', P .. 'rates', '-inf', seconds, 'LIMIT', 0, 2 * charged + 10)
  for _, code in ipairs(past) do redis.call('ZREM', P .. 'rates', code) end
end
local seq = meta[2]
local mine = '0'
if wrote then
  seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
  mine = seq
  redis.call('ZADD', P .. 'workers', seq, ARGV[3])
  if ARGV[11] ~= '0' and tonumber(ARGV[11]) > tonumber(redis.call('HGET', P .. 'meta', 'era') or 0) then
    redis.call('HSET', P .. 'meta', 'era', ARGV[11])
  end
end
return {time[1], time[2], seq, controls, mine, changed}
"""
)
SWAP = Script(_SWAP)
"""Write the states of keys that are as they were when they were read, and tell how the others are now.

ARGV: when they were read (or nothing) and how long ago that may be, with the controls in between; whether marks get
the server's time; the highest era; whether rates are swept. Of each key: bucket, code, state before and after, its
places in the indexes, and what else: three counts, rate before and after, letters. A bucket without a name keeps
letters only.
"""
SWAP_FREEING = Script(_SWAP, frees=True)
"""The same for what gives memory back: it works also when all memory that Redis may use is used."""

SET_CONTROLS = Script(
    _GUARD
    + """
local controls = redis.call('GET', P .. 'controls') or ''
local era = redis.call('HGET', P .. 'meta', 'era') or '0'
if ARGV[9] ~= '' and redis.call('ZCOUNT', P .. 'held', '(' .. string.format('%.6f', seconds), '+inf') > 0 then
  return {'held'}
end
if controls ~= ARGV[7] or (ARGV[9] ~= '' and era ~= ARGV[9]) then return {'changed', controls, era} end
if ARGV[8] == '' then redis.call('DEL', P .. 'controls') else redis.call('SET', P .. 'controls', ARGV[8]) end
local seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
redis.call('ZADD', P .. 'workers', seq, ARGV[3])
return {'done', seq}
""",
    frees=True,
)
"""Replace the controls. ARGV: before, after, and to raise the era the highest one known: then nobody may hold a key."""

COUNT = Script(
    _GUARD
    + """
local counts = redis.call('HMGET', P .. 'meta', 'keys', 'tombstones', 'suspects')
local held = redis.call('ZCOUNT', P .. 'held', '(' .. string.format('%.6f', seconds), '+inf')
return {tonumber(counts[1] or 0), tonumber(counts[2] or 0), held, tonumber(counts[3] or 0),
    redis.call('ZCARD', P .. 'buried')}
""",
    frees=True,
)

_PERIODIC_LOCK = (
    _GUARD
    + """
local done = redis.call('HGET', P .. 'periodic_locks', ARGV[7])
if done and seconds < tonumber(done) + tonumber(ARGV[8]) then return {0} end
redis.call('HSET', P .. 'periodic_locks', ARGV[7], string.format('%.6f', seconds))
return {1}
"""
)
PERIODIC_LOCK = Script(_PERIODIC_LOCK, frees=True)
PROBE = Script(_PERIODIC_LOCK)

# In a small ledger most buckets are empty, and many of them are passed over at once.
_SKIP = """
local function skipped(bucket, last)
  while bucket + 256 <= last do
    local names = {}
    for n = bucket, bucket + 255 do names[#names + 1] = P .. n end
    if redis.call('EXISTS', unpack(names)) > 0 then break end
    bucket = bucket + 256
  end
  return bucket
end
"""

WALK = Script(
    _GUARD
    + _SKIP
    + """
local bucket, cursor, left = tonumber(ARGV[7]), ARGV[8], tonumber(ARGV[10])
local found = {}
if cursor == '0' then bucket = skipped(bucket, tonumber(ARGV[9])) end
while bucket < tonumber(ARGV[9]) and left > 0 do
  local page = redis.call('HSCAN', P .. bucket, cursor, 'COUNT', 512)
  left = left - 1 - #page[2] / 2
  for at = 1, #page[2], 2 do
    local old = ARGV[11] == '' or struct.unpack('>I4', page[2][at + 1], 9) < tonumber(ARGV[11])
    if old and redis.call('HEXISTS', P .. 'active', page[2][at]) == 0 then
      found[#found + 1] = page[2][at]
      found[#found + 1] = 'i' .. page[2][at + 1]
    end
  end
  cursor = page[1]
  if cursor == '0' then
    bucket = bucket + 1
    if bucket % 256 == 0 then bucket = skipped(bucket, tonumber(ARGV[9])) end
  end
end
return {bucket, cursor, found}
""",
    frees=True,
)
"""Idle keys of a stretch of buckets. ARGV: bucket, cursor in it, behind the last bucket, how many, written before."""

FIELDS = Script(
    _GUARD
    + _SKIP
    + """
local bucket, found = skipped(tonumber(ARGV[7]), tonumber(ARGV[8])), 0
local pages = {}
for n = bucket, math.min(tonumber(ARGV[8]), bucket + 4096) - 1 do
  local page = redis.call('HKEYS', P .. n)
  if #page > 0 then
    pages[#pages + 1] = n
    pages[#pages + 1] = page
    found = found + #page
  end
  bucket = n + 1
  if found >= tonumber(ARGV[9]) then break end
end
return {bucket, pages}
""",
    frees=True,
)
"""All keys of a stretch of buckets. ARGV: the first bucket, behind the last, how many keys are enough."""

_RECORD = (
    _GUARD
    + """
for at = 7, #ARGV, 2 do
  local number = redis.call('HINCRBY', P .. 'meta', 'lines', 1)
  redis.call('XADD', P .. 'lines', number .. '-1', 'line', ARGV[at + 1])
  redis.call('ZADD', P .. 'lines-of', 0, ARGV[at] .. struct.pack('>I8', number))
end
return {1}
"""
)
RECORD = Script(_RECORD)
"""Add lines to the history. ARGV: of each, the prefix of its key's places, and the line."""
RECORD_ONE = Script(_RECORD, frees=True)
"""The same for an act that is done, which must be told though all memory is used."""

LINES_OF = Script(
    _GUARD
    + """
local places = redis.call('ZREVRANGEBYLEX', P .. 'lines-of', '[' .. ARGV[7] .. string.rep('\\255', 8),
    '[' .. ARGV[7], 'LIMIT', 0, ARGV[8])
local found = {}
for _, place in ipairs(places) do
  local number = string.format('%.0f', struct.unpack('>I8', place, #ARGV[7] + 1)) .. '-1'
  local line = redis.call('XRANGE', P .. 'lines', number, number)[1]
  if line then found[#found + 1] = line[2][2] end
end
return found
""",
    frees=True,
)

TRIM = Script(
    _GUARD
    + """
for at = 7, #ARGV, 2 do
  redis.call('XDEL', P .. 'lines', ARGV[at])
  local number = tonumber(string.match(ARGV[at], '%d+'))
  redis.call('ZREM', P .. 'lines-of', ARGV[at + 1] .. struct.pack('>I8', number))
end
return {1}
""",
    frees=True,
)

OPEN = Script(
    """
local P = ARGV[1]
local controls = redis.call('GET', P .. 'controls') or ''
if ARGV[7] ~= '' and controls ~= ARGV[9] then return {'changed'} end
redis.call('SADD', 'keywise:scopes', ARGV[8])
if redis.call('EXISTS', P .. 'meta') == 0 then
  redis.call('HSET', P .. 'meta', 'format', ARGV[6], 'nonce', ARGV[2], 'buckets', ARGV[3], 'seq', ARGV[5])
end
if ARGV[7] ~= '' then
  redis.call('SET', P .. 'controls', ARGV[10])
  if tonumber(redis.call('HGET', P .. 'meta', 'seq')) < tonumber(ARGV[5]) then
    redis.call('HSET', P .. 'meta', 'seq', ARGV[5])
  end
  redis.call('ZADD', P .. 'workers', redis.call('HGET', P .. 'meta', 'seq'), ARGV[4])
end
local last = -1 - tonumber(ARGV[11])
local gone = redis.call('ZRANGE', P .. 'workers', last, last, 'WITHSCORES')
if #gone > 0 then
  redis.call('HSET', P .. 'meta', 'forgotten', gone[2])
  redis.call('ZREMRANGEBYRANK', P .. 'workers', 0, last)
end
return redis.call('HMGET', P .. 'meta', 'format', 'nonce', 'buckets', 'seq')
""",
    # When memory is used up, whoever wants to make room has to come in.
    frees=True,
)
"""What holds for a scope, which is made if it is new. ARGV: prefix, nonce, buckets, worker, seen, format, whether this
worker has found that something was lost, the scope's name, the controls before and after that is noted in it,
and of how many workers the numbers are kept."""

DROP = Script(
    _GUARD
    + """
local gone = 0
for at = 7, #ARGV do
  gone = gone + redis.call('HDEL', P .. 'letters', ARGV[at])
  redis.call('ZREM', P .. 'buried', string.format('%016d', ARGV[at]))
end
return {gone}
""",
    frees=True,
)

KEEP = Script(
    _GUARD
    + """
for at = 7, #ARGV, 2 do
  local number = redis.call('HINCRBY', P .. 'meta', 'letters', 1)
  redis.call('HSET', P .. 'letters', number, ARGV[at + 1])
  redis.call('ZADD', P .. 'buried', ARGV[at], string.format('%016d', number))
end
return {1}
"""
)
"""Add dead letters that were buried elsewhere. ARGV: of each, when it was, and the letter."""

FLOOR = Script(
    _GUARD
    + """
local last = math.max(tonumber(redis.call('HGET', P .. 'meta', 'token') or 0), tonumber(ARGV[7]))
redis.call('HSET', P .. 'meta', 'token', string.format('%.0f', last))
return {string.format('%.0f', last)}
""",
    frees=True,
)
"""Grant only tokens above a number, and tell which is the last one that may have been granted."""

HOLDS = """
for _, name in ipairs({'active', 'rates', 'buried', 'lines', 'controls'}) do
  if redis.call('EXISTS', ARGV[1] .. name) == 1 then return 1 end
end
return tonumber(redis.call('HGET', ARGV[1] .. 'meta', 'keys') or 0) > 0 and 1 or 0
"""
HOLDING = Script(HOLDS, frees=True)
"""Whether a scope holds anything. ARGV: prefix."""
