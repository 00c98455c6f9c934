-- Lead the workers of a model, if no other worker does; see omlx_worker.queue.upkeep. A worker leads
-- until its lock expires.
--
-- KEYS[1]    lock
-- ARGV[1]    worker name
-- ARGV[2]    milliseconds until the lock expires; 0 gives it up

local leader = redis.call('GET', KEYS[1])
if leader and leader ~= ARGV[1] then return false end
if ARGV[2] == '0' then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return true
