-- The beginning of every script that a worker calls once it knows the scope.
-- A worker that knows of more writes than the server does has found a loss. Then the script does nothing at all.
-- ARGV: prefix, nonce, worker, the number of the last write that the worker has seen, and of its own last write.
-- The arguments of the script itself begin with ARGV[6].
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
local seconds = tonumber(time[1]) + tonumber(time[2]) / 1000000
local function state_of(bucket, code)
  local active = redis.call('HGET', P .. 'active', code)
  if active then return 'a' .. active end
  local idle = redis.call('HGET', P .. bucket, code)
  if idle then return 'i' .. idle end
  return ''
end
