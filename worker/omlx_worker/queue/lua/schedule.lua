-- Move jobs to their queues: scheduled ones that are due, as RQ's scheduler does, and dependents that
-- are ready. Scheduled jobs of a queue whose lock a scheduler holds are left to that scheduler.
--
-- KEYS     names of queues (names, not keys)
-- ARGV[1]  most jobs to move for one queue
--
-- Returns the ids of the moved jobs.

local time, date = now()
local moved = {}

local awaited = {scheduled = true, created = true, ready_to_enqueue = true}

-- Returns false if the queue is of another type; the job then stays where it is.
local function enqueue_due(queue, job)
  local fields = redis.pcall('HMGET', job_key(job), 'status', 'ended_at', 'enqueue_at_front',
    'enqueue_at_front_on_retry')
  -- Deleted, cancelled, or already enqueued.
  if fields.err or not awaited[fields[1]] then return true end
  local has_run = fields[2] and fields[2] ~= ''
  local at_front = fields[3] == '1' or (has_run and fields[4] == '1')
  if not enqueue(queue, job, at_front, date) then return false end
  moved[#moved + 1] = job
  return true
end

local function move(queue, registry, jobs)
  for _, job in ipairs(jobs or {}) do
    if enqueue_due(queue, job) then redis.call('ZREM', registry, job) end
  end
end

for _, queue in ipairs(KEYS) do
  if redis.call('EXISTS', RQ .. 'scheduler-lock:' .. queue) == 0 then
    local scheduled = RQ .. 'scheduled:' .. queue
    move(queue, scheduled,
      try('ZRANGEBYSCORE', scheduled, '-inf', number(time), 'LIMIT', 0, ARGV[1]))
  end
  -- RQ enqueues them after the transaction that made them ready, and may have been interrupted.
  local ready = RQ .. 'ready:' .. queue
  move(queue, ready, try('ZRANGE', ready, 0, ARGV[1] - 1))
end
return answer(moved)
