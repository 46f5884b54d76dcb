-- Grant only tokens above a number, and return the last one that may have been granted.
-- ARGV: the number.
local last = math.max(tonumber(redis.call('HGET', P .. 'meta', 'token') or 0), tonumber(ARGV[6]))
redis.call('HSET', P .. 'meta', 'token', string.format('%.0f', last))
return {string.format('%.0f', last)}
