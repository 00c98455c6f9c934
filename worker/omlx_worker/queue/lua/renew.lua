-- Renew many leases in one call.
--
-- ARGV[1]    lease in seconds
-- ARGV[2]    grace in seconds, see `extend`
-- ARGV[3..]  for each: queue, job, execution
--
-- Returns {job, status, job, status, ...} for leases that are gone. 'stop' in place of the status
-- means that the lease was renewed and the job is to be stopped.

local lease, grace = tonumber(ARGV[1]), tonumber(ARGV[2])
local time, date = now()
local told = {}
for i = 3, #ARGV, 3 do
  local queue, job, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local reason = false
  -- An error if the key is of another type.
  local fields = redis.pcall('HLEN', job_key(job))
  if holds(queue, job, execution) and type(fields) == 'number' and fields > 0 then
    write('HSET', execution_key(job, execution), 'last_heartbeat', number(time))
    redis.call('HSET', job_key(job), 'last_heartbeat', date)
    extend(queue, job, execution, time, lease, grace)
    if redis.call('HEXISTS', job_key(job), STOP) == 1 then reason = 'stop' end
  else
    reason = status(job)
  end
  if reason then
    told[#told + 1] = job
    told[#told + 1] = reason
  end
end
return answer(told)
