-- Cancel a batch, or take back its rows: those that wait leave it, also those that have a job again.
-- Rows that run end, and a cancel stops them.
--
-- ARGV[1]    run
-- ARGV[2]    who cancels it; '' takes back
-- ARGV[3..]  queues of its rows
--
-- Returns false if it is over; else the names of the rows that run.

local run, key, by = ARGV[1], batch_key(ARGV[1]), ARGV[2]
local state = redis.call('HGET', key, 'state')
if state ~= 'uploading' and state ~= 'open' and state ~= 'cancelling' then return false end
if by ~= '' then
  redis.call('HSETNX', key, 'cancelling_at', number(now()))
  redis.call('HSET', key, 'cancelled_by', by)
end
redis.call('HSET', key, 'state', 'cancelling')
local running = {}

local function drop(queue, row, job)
  redis.call('LREM', queue_key(queue), 0, job)
  redis.call('DEL', job_key(job), events_key(job))
  redis.call('HDEL', batch_running_key(run, queue), row)
end

local function leave(queue, row)
  local job = row_job(run, row)
  local state = status(job)
  if state == 'queued' or state == 'deleted' then return drop(queue, row, job) end
  running[#running + 1] = row
  if by ~= '' then redis.call('HSET', job_key(job), STOP_FIELD, 1) end
end

for i = 3, #ARGV do
  redis.call('DEL', batch_waiting_key(run, ARGV[i]))
  redis.call('ZREM', open_key(ARGV[i]), run)
  for _, row in ipairs(redis.call('HKEYS', batch_running_key(run, ARGV[i]))) do leave(ARGV[i], row) end
end
redis.call('HSET', key, 'left', #running)
if #running == 0 then end_batch(run, 'cancelled') end
return running
