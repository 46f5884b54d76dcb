-- Find idle keys in a stretch of buckets.
-- ARGV: bucket, cursor in it, the bucket behind the last one, how many keys, written before when.
local bucket, cursor, left = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[9])
local found = {}
if cursor == '0' then bucket = skipped(bucket, tonumber(ARGV[8])) end
while bucket < tonumber(ARGV[8]) and left > 0 do
  local page = redis.call('HSCAN', P .. bucket, cursor, 'COUNT', 512)
  left = left - 1 - #page[2] / 2
  for at = 1, #page[2], 2 do
    local old = struct.unpack('>I4', page[2][at + 1], 9) < tonumber(ARGV[10])
    if old and redis.call('HEXISTS', P .. 'active', page[2][at]) == 0 then
      found[#found + 1] = page[2][at]
      found[#found + 1] = 'i' .. page[2][at + 1]
    end
  end
  cursor = page[1]
  if cursor == '0' then
    bucket = bucket + 1
    if bucket % 256 == 0 then bucket = skipped(bucket, tonumber(ARGV[8])) end
  end
end
return {bucket, cursor, found}
