-- Renew many leases in one call.
--
-- ARGV[1]    lease in seconds
-- ARGV[2]    grace in seconds, see `extend`
-- ARGV[3..]  for each: queue, job, execution
--
-- Returns those that are gone: {job, status, job, status, ...}

local lease, grace = tonumber(ARGV[1]), tonumber(ARGV[2])
local time, date = now()
local gone = {}
for i = 3, #ARGV, 3 do
  local queue, job, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  if holds(queue, job, execution) and redis.call('EXISTS', job_key(job)) == 1 then
    redis.call('HSET', execution_key(job, execution), 'last_heartbeat', number(time))
    redis.call('HSET', job_key(job), 'last_heartbeat', date)
    extend(queue, job, execution, time, lease, grace)
  else
    gone[#gone + 1] = job
    gone[#gone + 1] = status(job)
  end
end
return gone
