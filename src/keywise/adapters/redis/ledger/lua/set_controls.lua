-- Replace the controls.
-- ARGV: before, after, and to raise the era the highest one known: then nobody may hold a key.
local controls = redis.call('GET', P .. 'controls') or '{}'
local era = redis.call('HGET', P .. 'meta', 'era') or '0'
if ARGV[8] ~= '' and redis.call('ZCOUNT', P .. 'held', '(' .. string.format('%.6f', seconds), '+inf') > 0 then
  return {'held'}
end
if controls ~= ARGV[6] or (ARGV[8] ~= '' and era ~= ARGV[8]) then return {'changed', controls, era} end
if ARGV[7] == '{}' then redis.call('DEL', P .. 'controls') else redis.call('SET', P .. 'controls', ARGV[7]) end
local seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
redis.call('ZADD', P .. 'workers', seq, ARGV[3])
return {'done', seq}
