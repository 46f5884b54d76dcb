-- Add lines to the history.
-- ARGV: of each, the prefix of its key's places, and the line.
for at = 6, #ARGV, 2 do
  local number = redis.call('HINCRBY', P .. 'meta', 'lines', 1)
  redis.call('XADD', P .. 'lines', number .. '-1', 'line', ARGV[at + 1])
  redis.call('ZADD', P .. 'lines-of', 0, ARGV[at] .. struct.pack('>I8', number))
end
return {1}
