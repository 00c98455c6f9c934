-- Lead the workers of a model, if no other worker does; see omlx_worker.queue.upkeep. A worker leads
-- until its lock expires.
--
-- KEYS[1]    lock
-- ARGV[1]    worker name
-- ARGV[2]    milliseconds until the lock expires; 0 gives it up

local leader, most = redis.call('GET', KEYS[1]), tonumber(ARGV[2])
if leader and leader ~= ARGV[1] then
  -- The clock has gone back since the lock was set.
  if most > 0 and redis.call('PTTL', KEYS[1]) > most then redis.call('PEXPIRE', KEYS[1], most) end
  return false
end
if most == 0 then return redis.call('DEL', KEYS[1]) end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return true
