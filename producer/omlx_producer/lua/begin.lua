-- Make a batch, unless there is one with this id. An upload that has stopped is replaced.
--
-- ARGV[1]    run
-- ARGV[2]    time
-- ARGV[3]    seconds to keep an upload
-- ARGV[4]    seconds after which an upload has stopped
-- ARGV[5..]  fields of the batch
--
-- Returns whether it was made, also by an earlier call whose answer was lost.

local run, key = ARGV[1], batch_key(ARGV[1])
local created, state, queues = unpack(redis.call('HMGET', key, 'created_at', 'state', 'queues'))
if created == ARGV[2] then return 1 end
if created then
  local alive = redis.call('TTL', key) > ARGV[3] - ARGV[4]
  if state ~= 'uploading' or alive then return 0 end
end
drop_waiting(run, queues)
redis.call('DEL', key, batch_results_key(run))
redis.call('HSET', key, 'state', 'uploading', 'created_at', ARGV[2], unpack(ARGV, 5))
redis.call('EXPIRE', key, ARGV[3])
return 1
