-- Read the states of keys, and reserve tokens.
-- ARGV: how many tokens, whether to read rates too, then bucket and code of each key.
local first = ''
local count = tonumber(ARGV[6])
if count > 0 then
  local last = tonumber(redis.call('HGET', P .. 'meta', 'token') or 0)
  local start = math.max(last + 1, tonumber(time[1]) * 1000000 + tonumber(time[2]))
  redis.call('HSET', P .. 'meta', 'token', string.format('%.0f', start + count - 1))
  first = string.format('%.0f', start)
end
local states, rates = {}, {}
for at = 8, #ARGV, 2 do
  states[#states + 1] = state_of(ARGV[at], ARGV[at + 1])
  if ARGV[7] ~= '' then rates[#rates + 1] = redis.call('ZSCORE', P .. 'rates', ARGV[at + 1]) or '' end
end
return {time[1], time[2], meta[2], redis.call('GET', P .. 'controls') or '{}', first, states, rates}
