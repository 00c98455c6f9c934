-- Put jobs that this worker will not finish back at the front of their queues.
--
-- ARGV  for each: queue, job, execution; the last one ends up first in its queue
--
-- Returns the number of jobs put back. A job whose lease is gone is not.

local returned = 0
for i = 1, #ARGV, 3 do
  local queue, job, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if holds(queue, job, execution) and put_back(queue, job, execution) then
    -- Its worker lives, so having been alone proves nothing.
    redis.call('HDEL', job_key(job), ALONE)
    returned = returned + 1
  end
end
return answer(returned)
