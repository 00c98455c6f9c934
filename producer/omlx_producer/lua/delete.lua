-- Delete a batch with the jobs of its rows.
--
-- ARGV[1]    run
-- ARGV[2..]  queues of its rows

local run = ARGV[1]
for i = 2, #ARGV do
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
redis.call('UNLINK', unpack(batch_parts(run)))
