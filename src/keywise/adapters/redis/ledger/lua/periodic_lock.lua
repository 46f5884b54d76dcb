-- Acquire a periodic lock.
-- ARGV: the task, and how many seconds have to lie between two times.
local done = redis.call('HGET', P .. 'periodic_locks', ARGV[6])
if done and seconds < tonumber(done) + tonumber(ARGV[7]) then return {0} end
redis.call('HSET', P .. 'periodic_locks', ARGV[6], string.format('%.6f', seconds))
return {1}
