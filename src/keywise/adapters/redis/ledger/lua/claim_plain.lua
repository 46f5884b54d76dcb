-- Claim keys that are idle, at versions that are plainly newer: what the rules would grant, in one step. Return the
-- number of the first token (each key has the next one), and the indexes of the keys that the rules have to decide.
-- ARGV: how long the leases last, and how long after its lease a claim is suspect (or nothing); the retention (or
-- nothing) and when the first of the changes was sent; the random part of the tokens, the last bytes of each
-- stored claim (its intent and its owner), all versions; then the codes of all keys, then their buckets.
local count = (#ARGV - 12) / 2
local versions = ARGV[12]
local start = math.max(tonumber(redis.call('HGET', P .. 'meta', 'token') or 0) + 1,
    tonumber(time[1]) * 1000000 + tonumber(time[2]))
local first = string.format('%.0f', start)
-- Of the controls, only an era, pauses and a barrier decide claims.
local controls = redis.call('GET', P .. 'controls') or '{}'
if controls ~= '{}' and string.find(controls, '{"era":0,"pauses":[],"move":null,', 1, true) ~= 1 then
  return {meta[2], '0', first, 'controls'}
end
local takes_new = ARGV[8] == '' or tonumber(ARGV[9]) >= seconds - tonumber(ARGV[8])
local lease_until = seconds + tonumber(ARGV[6])
local held_until = string.format('%.17g', lease_until)
local times, nonce = struct.pack('>dd', seconds, lease_until), tonumber(ARGV[10])
local sub, pack, number_at = string.sub, struct.pack, struct.unpack
local active = redis.call('HMGET', P .. 'active', unpack(ARGV, 13, 12 + count))
local claims, held, others = {}, {}, {}
for n = 1, count do
  local code, mark = ARGV[12 + n]
  if not active[n] then
    local idle = redis.call('HGET', P .. ARGV[12 + count + n], code)
    if not idle then
      mark = takes_new and '\0\0\0\0\0\0\0\0\0'
    elseif #idle <= 13 and number_at('>i8', idle) < number_at('>i8', versions, 8 * n - 7) then
      -- Lua rounds versions above 2^53: two of them may look equal, and the rules decide. A lower one never looks higher.
      mark = (#idle == 12 and '\1' or '\2') .. sub(idle, 1, 8)
    end
  end
  if mark then
    -- A token is a number and 11 random bits. That is too long for a number of Lua, so there are two halves.
    local number = start + n - 1
    claims[#claims + 1] = code
    claims[#claims + 1] = '\1' .. pack('>I4I4', math.floor(number / 2097152), number % 2097152 * 2048 + nonce)
        .. sub(versions, 8 * n - 7, 8 * n) .. times .. mark .. ARGV[11]
    held[#held + 1] = held_until
    held[#held + 1] = code
  else
    others[#others + 1] = n - 1
  end
end
if #claims == 0 then return {meta[2], '0', first, others} end
redis.call('HSET', P .. 'active', unpack(claims))
redis.call('ZADD', P .. 'held', unpack(held))
if ARGV[7] ~= '' then
  local suspect_since = string.format('%.17g', lease_until + tonumber(ARGV[7]))
  for at = 1, #held, 2 do held[at] = suspect_since end
  redis.call('ZADD', P .. 'suspect', unpack(held))
end
redis.call('HSET', P .. 'meta', 'token', string.format('%.0f', start + count - 1))
local seq = redis.call('HINCRBY', P .. 'meta', 'seq', 1)
redis.call('ZADD', P .. 'workers', seq, ARGV[3])
return {seq, seq, first, others}
