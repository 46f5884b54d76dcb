-- Return what holds for a scope, which is made if it is new.
-- ARGV: prefix, nonce, buckets, worker, seen, format, whether this worker has found a loss, the name of the scope, the
-- controls before and after the loss is noted in them, and of how many workers the numbers are kept.
local P = ARGV[1]
local controls = redis.call('GET', P .. 'controls') or '{}'
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
