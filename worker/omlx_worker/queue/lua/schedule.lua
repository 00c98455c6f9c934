-- Move jobs to their queues: scheduled ones that are due, as RQ's scheduler does, and dependents that
-- are ready. Scheduled jobs of a queue whose lock a scheduler holds are left to that scheduler.
--
-- ARGV[1]  queue
-- ARGV[2]  how many jobs of each kind to look at
--
-- Returns {ids of the moved jobs, number of jobs that it looked at}.

local time, date = now()
local queue, most = ARGV[1], tonumber(ARGV[2])
local moved, looked = {}, 0

local awaited = {scheduled = true, created = true, ready_to_enqueue = true}

local function move(registry, job)
  local fields = redis.call('HMGET', job_key(job), 'status', 'ended_at', 'enqueue_at_front',
    'enqueue_at_front_on_retry')
  -- Others were deleted or cancelled, or are already in the queue.
  if awaited[fields[1]] then
    local has_run = fields[2] and fields[2] ~= ''
    enqueue(queue, job, fields[3] == '1' or (has_run and fields[4] == '1'), date)
    moved[#moved + 1] = job
  end
  redis.call('ZREM', registry, job)
end

local function move_all(registry, latest)
  local jobs = redis.call('ZRANGEBYSCORE', registry, '-inf', latest, 'LIMIT', 0, most)
  for _, job in ipairs(jobs) do move(registry, job) end
  looked = looked + #jobs
end

if redis.call('EXISTS', RQ .. 'scheduler-lock:' .. queue) == 0 then
  move_all(RQ .. 'scheduled:' .. queue, number(time))
end
-- RQ enqueues them after the transaction that made them ready, and may have been interrupted.
move_all(RQ .. 'ready:' .. queue, '+inf')
return {moved, looked}
