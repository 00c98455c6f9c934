-- Put jobs that this worker will not finish back at the front of their queues.
--
-- ARGV  for each: queue, job, execution, payload. The payload is that of the job's next turn, or ''.
--       The last job of the list ends up first in its queue.
--
-- Returns for each: 1 if it was put back, 0 if its lease was gone or a key is of another type.

local KEEP = 1  -- seconds; the worker looks at once

local function next_turn(queue, job, execution, payload)
  if payload ~= '' and holds(queue, job, execution) then
    local worker = redis.call('HGET', job_key(job), 'worker_name') or ''
    redis.call('HSET', job_key(job), 'data', payload, KEPT, number(now() + KEEP) .. ' ' .. worker)
    redis.call('HDEL', job_key(job), DEATHS)
  end
  return give_back(queue, job, execution)
end

local replies = {}
for i = 1, #ARGV, 4 do
  replies[#replies + 1] = attempt(next_turn, unpack(ARGV, i, i + 3)) and 1 or 0
end
return replies
