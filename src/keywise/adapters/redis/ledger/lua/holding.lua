-- Whether a scope holds anything.
-- ARGV: prefix.
for _, name in ipairs({'active', 'rates', 'buried', 'lines', 'controls'}) do
  if redis.call('EXISTS', ARGV[1] .. name) == 1 then return 1 end
end
return tonumber(redis.call('HGET', ARGV[1] .. 'meta', 'keys') or 0) > 0 and 1 or 0
