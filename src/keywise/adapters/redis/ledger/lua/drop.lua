-- Remove dead letters.
-- ARGV: their numbers.
local gone = 0
for at = 6, #ARGV do
  gone = gone + redis.call('HDEL', P .. 'letters', ARGV[at])
  redis.call('ZREM', P .. 'buried', string.format('%016d', ARGV[at]))
end
return {gone}
