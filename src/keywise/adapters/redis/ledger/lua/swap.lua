-- Write the states of keys that are as they were when they were read, and return how the others are now.
-- ARGV: when they were read (or nothing), the controls, how long ago that may be, whether marks get the server's time,
-- the highest era, whether to sweep rates. Then of each key: bucket, code, state before and after, its places in the
-- two indexes, and what else: three counts, rate before and after, letters.
local controls = redis.call('GET', P .. 'controls') or '{}'
local fits = (ARGV[7] == '*' or ARGV[7] == '=' .. controls)
    and (ARGV[6] == '' or seconds - tonumber(ARGV[6]) <= tonumber(ARGV[8]))
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
for at = 12, #ARGV, 7 do
  local bucket, code, expected, after = ARGV[at], ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local more = ARGV[at + 6]
  local keys, tombstones, suspects, rate_before, rate_after, letters = 0, 0, 0, '', '', 1
  if more ~= '' then
    keys, tombstones, suspects, rate_before, rate_after, letters = struct.unpack('>bbbBc0Bc0', more)
  end
  local current = state_of(bucket, code)
  local function rate() return redis.call('ZSCORE', P .. 'rates', code) or '' end
  if not fits or current ~= expected or (rate_after ~= '' and rate() ~= rate_before) then
    changed[#changed + 1] = (at - 12) / 7
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
        if ARGV[9] ~= '' then
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
if charged > 0 and ARGV[11] ~= '' then
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
  if ARGV[10] ~= '0' and tonumber(ARGV[10]) > tonumber(redis.call('HGET', P .. 'meta', 'era') or 0) then
    redis.call('HSET', P .. 'meta', 'era', ARGV[10])
  end
end
return {time[1], time[2], seq, controls, mine, changed}
