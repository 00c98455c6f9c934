-- Make the batch of a run. While rows of it are left, it does not expire; without any, a command
-- begins it anew.
--
-- ARGV[1]    run
-- ARGV[2]    '1' at the start of a command
-- ARGV[3..]  fields of the batch
--
-- Returns who has cancelled it, or false.

local run, key = ARGV[1], batch_key(ARGV[1])
local by = redis.call('HGET', key, 'cancelled_by')
if ARGV[2] == '1' then
  redis.call('HDEL', key, 'cancelled_by', 'cancelling_at')
  if tonumber(redis.call('HGET', key, 'left') or 0) <= 0 then redis.call('DEL', key) end
elseif by then
  return by
end
redis.call('HSETNX', key, 'created_at', number(now()))
redis.call('HSET', key, 'keep_seconds', KEEP_SECONDS, unpack(ARGV, 3))
if not redis.call('ZSCORE', BATCHES_KEY, run) then
  redis.call('EXPIRE', key, KEEP_SECONDS, 'NX')
end
return by
