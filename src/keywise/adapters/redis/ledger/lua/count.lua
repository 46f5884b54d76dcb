-- Count keys, tombstones, held keys, suspects and dead letters.
local counts = redis.call('HMGET', P .. 'meta', 'keys', 'tombstones', 'suspects')
local held = redis.call('ZCOUNT', P .. 'held', '(' .. string.format('%.6f', seconds), '+inf')
return {tonumber(counts[1] or 0), tonumber(counts[2] or 0), held, tonumber(counts[3] or 0),
    redis.call('ZCARD', P .. 'buried')}
