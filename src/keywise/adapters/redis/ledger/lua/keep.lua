-- Add dead letters that end no claim.
-- ARGV: of each, when it was buried (or nothing: now), and the letter.
for at = 6, #ARGV, 2 do
  local number = redis.call('HINCRBY', P .. 'meta', 'letters', 1)
  local buried_at = ARGV[at] ~= '' and ARGV[at] or string.format('%.6f', seconds)
  redis.call('HSET', P .. 'letters', number, ARGV[at + 1])
  redis.call('ZADD', P .. 'buried', buried_at, string.format('%016d', number))
end
local seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
redis.call('ZADD', P .. 'workers', seq, ARGV[3])
return {seq}
