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

local function move(queue, registry, job)
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

local function move_due(queue)
  if redis.call('EXISTS', RQ .. 'scheduler-lock:' .. queue) == 1 then return end
  local scheduled = RQ .. 'scheduled:' .. queue
  local due = redis.call('ZRANGEBYSCORE', scheduled, '-inf', number(time), 'LIMIT', 0, ARGV[1])
  for _, job in ipairs(due) do attempt(move, queue, scheduled, job) end
end

-- RQ enqueues them after the transaction that made them ready, and may have been interrupted.
local function move_ready(queue)
  local ready = RQ .. 'ready:' .. queue
  for _, job in ipairs(redis.call('ZRANGE', ready, 0, ARGV[1] - 1)) do
    attempt(move, queue, ready, job)
  end
end

for _, queue in ipairs(KEYS) do
  attempt(move_due, queue)
  attempt(move_ready, queue)
end
return moved
