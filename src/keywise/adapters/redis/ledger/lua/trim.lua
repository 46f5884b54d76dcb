-- Remove lines of the history.
-- ARGV: of each, its number, and the prefix of its key's places.
for at = 6, #ARGV, 2 do
  redis.call('XDEL', P .. 'lines', ARGV[at])
  local number = tonumber(string.match(ARGV[at], '%d+'))
  redis.call('ZREM', P .. 'lines-of', ARGV[at + 1] .. struct.pack('>I8', number))
end
return {1}
