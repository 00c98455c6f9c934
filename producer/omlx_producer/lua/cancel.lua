-- Cancel a batch: rows that wait are dropped, rows with jobs end as they are stopped. Into the batch of
-- a run no row enters from then on, its client is told, and withdraw.lua takes the rows that wait.
--
-- ARGV[1]    run
-- ARGV[2]    who cancels it
-- ARGV[3..]  queues of its rows
--
-- Returns false if it is over; else whether it is a run's, and the names of the rows that run.

local run, key = ARGV[1], batch_key(ARGV[1])
local state, home = unpack(redis.call('HMGET', key, 'state', 'home'))
if state ~= 'uploading' and state ~= 'open' and state ~= 'cancelling' then return false end
redis.call('HSETNX', key, 'cancelling_at', number(now()))
redis.call('HSET', key, 'cancelled_by', ARGV[2], 'state', 'cancelling')
local running = {}
for i = 3, #ARGV do
  local queue = ARGV[i]
  if not home then
    redis.call('DEL', batch_waiting_key(run, queue))
    redis.call('ZREM', open_key(queue), run)
  end
  for _, row in ipairs(redis.call('HKEYS', batch_running_key(run, queue))) do
    running[#running + 1] = row
    local job = job_key(row_job(run, row))
    if redis.call('EXISTS', job) == 1 then redis.call('HSET', job, STOP_FIELD, 1) end
  end
end
if home then return {1, running} end
redis.call('HSET', key, 'left', #running)
if #running == 0 then end_batch(run, 'cancelled') end
return {0, running}
