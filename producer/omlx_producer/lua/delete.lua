-- Delete a batch with the jobs of its rows.
--
-- ARGV[1]    run
-- ARGV[2]    '1' to leave who has cancelled a batch of a run until it expires: the command may be away
-- ARGV[3..]  queues of its rows

local run = ARGV[1]
for i = 3, #ARGV do
  local queue = ARGV[i]
  for _, row in ipairs(redis.call('HKEYS', batch_running_key(run, queue))) do
    local job = row_job(run, row)
    redis.call('UNLINK', job_key(job), events_key(job))
  end
  redis.call('UNLINK', batch_waiting_key(run, queue), batch_running_key(run, queue))
  redis.call('ZREM', open_key(queue), run)
end
redis.call('ZREM', BATCHES_KEY, run)
redis.call('ZREM', BATCHES_ENDED_KEY, run)
redis.call('UNLINK', batch_results_key(run))
local key = batch_key(run)
local home, by = unpack(redis.call('HMGET', key, 'home', 'cancelled_by'))
if ARGV[2] ~= '1' or not (home and by) then return redis.call('UNLINK', key) end
let_expire(run)
for _, field in ipairs(redis.call('HKEYS', key)) do
  if field ~= 'cancelled_by' then redis.call('HDEL', key, field) end
end
