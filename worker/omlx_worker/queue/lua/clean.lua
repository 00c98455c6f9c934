-- Remove what has expired from RQ's registries of ended jobs.
--
-- RQ never removes a cancelled job from its registry. Here its score becomes the time at which the
-- job expires, as in RQ's other registries, or that of the next look if it never does. It leaves
-- when the job is gone.
--
-- KEYS     names of queues (names, not keys)
-- ARGV[1]  most cancelled jobs to look at for one queue

local time = now()

local function clean(queue, registry)
  redis.call('ZREMRANGEBYSCORE', RQ .. registry .. queue, 0, number(time))
end

local function clean_cancelled(queue)
  local cancelled = RQ .. 'canceled:' .. queue
  local due = redis.call('ZRANGEBYSCORE', cancelled, '-inf', number(time), 'LIMIT', 0, ARGV[1])
  for _, job in ipairs(due) do
    local milliseconds = redis.call('PTTL', job_key(job))
    if status(job) ~= 'canceled' then
      redis.call('ZREM', cancelled, job)
    else
      local seconds = milliseconds > 0 and milliseconds / 1000 or 86400
      redis.call('ZADD', cancelled, number(time + seconds), job)
    end
  end
end

for _, queue in ipairs(KEYS) do
  attempt(clean, queue, 'finished:')
  attempt(clean, queue, 'failed:')
  attempt(clean_cancelled, queue)
end
