-- Commit plain claims that nothing but a renewal has happened to, and return the indexes of the others.
-- ARGV: tokens and versions of all claims, of each whether it deletes its key; then the codes of all keys, then their
-- buckets.
local count = (#ARGV - 7) / 2
local sub, byte = string.sub, string.byte
local at = struct.pack('>I4', math.ceil(seconds))
local active = redis.call('HMGET', P .. 'active', unpack(ARGV, 8, 7 + count))
local ended, others, keys, tombstones = {}, {}, 0, 0
for n = 1, count do
  local claim = active[n]
  if claim and byte(claim) == 1 and sub(claim, 2, 17) == sub(ARGV[6], 16 * n - 15, 16 * n) then
    local kind, deletes = byte(claim, 34), byte(ARGV[7], n)
    redis.call('HSET', P .. ARGV[7 + count + n], ARGV[7 + n], sub(claim, 10, 17) .. at .. (deletes == 1 and '\1' or ''))
    if kind == 0 then keys = keys + 1 end
    tombstones = tombstones + deletes - (kind == 2 and 1 or 0)
    ended[#ended + 1] = ARGV[7 + n]
  else
    others[#others + 1] = n - 1
  end
end
if #ended == 0 then return {meta[2], '0', others} end
redis.call('HDEL', P .. 'active', unpack(ended))
redis.call('ZREM', P .. 'held', unpack(ended))
redis.call('ZREM', P .. 'suspect', unpack(ended))
if keys ~= 0 then redis.call('HINCRBY', P .. 'meta', 'keys', keys) end
if tombstones ~= 0 then redis.call('HINCRBY', P .. 'meta', 'tombstones', tombstones) end
local seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
redis.call('ZADD', P .. 'workers', seq, ARGV[3])
return {seq, seq, others}
