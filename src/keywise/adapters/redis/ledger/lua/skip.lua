-- In a small ledger most buckets are empty: pass over 256 of them in one call.
local function skipped(bucket, last)
  while bucket + 256 <= last do
    local names = {}
    for n = bucket, bucket + 255 do names[#names + 1] = P .. n end
    if redis.call('EXISTS', unpack(names)) > 0 then break end
    bucket = bucket + 256
  end
  return bucket
end
