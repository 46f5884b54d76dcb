-- List all keys of a stretch of buckets.
-- ARGV: the first bucket, the bucket behind the last one, how many keys are enough.
local bucket, found = skipped(tonumber(ARGV[6]), tonumber(ARGV[7])), 0
local pages = {}
for n = bucket, math.min(tonumber(ARGV[7]), bucket + 4096) - 1 do
  local page = redis.call('HKEYS', P .. n)
  if #page > 0 then
    pages[#pages + 1] = n
    pages[#pages + 1] = page
    found = found + #page
  end
  bucket = n + 1
  if found >= tonumber(ARGV[8]) then break end
end
return {bucket, pages}
