-- Add dead letters that were buried elsewhere.
-- ARGV: of each, when it was buried, and the letter.
for at = 6, #ARGV, 2 do
  local number = redis.call('HINCRBY', P .. 'meta', 'letters', 1)
  redis.call('HSET', P .. 'letters', number, ARGV[at + 1])
  redis.call('ZADD', P .. 'buried', ARGV[at], string.format('%016d', number))
end
return {1}
