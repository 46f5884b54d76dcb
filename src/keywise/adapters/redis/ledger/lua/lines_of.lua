-- Read the latest lines of one key.
-- ARGV: the prefix of its places, how many lines.
local places = redis.call('ZREVRANGEBYLEX', P .. 'lines-of', '[' .. ARGV[6] .. string.rep('\255', 8),
    '[' .. ARGV[6], 'LIMIT', 0, ARGV[7])
local found = {}
for _, place in ipairs(places) do
  local number = string.format('%.0f', struct.unpack('>I8', place, #ARGV[6] + 1)) .. '-1'
  local line = redis.call('XRANGE', P .. 'lines', number, number)[1]
  if line then found[#found + 1] = line[2][2] end
end
return found
