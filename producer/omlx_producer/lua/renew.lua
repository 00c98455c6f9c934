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

local function renew(queue, job, execution)
  local reason = false
  -- A microsecond later each: sweep.lua goes by the time.
  time = time + 0.000001
  if holds(queue, job, execution) and redis.call('EXISTS', job_key(job)) == 1 then
    extend(queue, job, execution, time, lease, grace)
    redis.call('HSET', job_key(job), 'last_heartbeat', date)
    if redis.call('HEXISTS', job_key(job), STOP_FIELD) == 1 then reason = 'stop' end
  else
    reason = refuse(job, execution)
  end
  if reason then
    told[#told + 1] = job
    told[#told + 1] = reason
  end
end

for i = 3, #ARGV, 3 do renew(unpack(ARGV, i, i + 2)) end
return told
