-- Put jobs back that read as started and run nowhere. Without RQ's registry, which an operator may
-- have deleted, sweep.lua does not find the jobs of workers that died.
--
-- ARGV[1]    where the last call ended, '0' at first
-- ARGV[2]    how many of the server's keys to look at, about
-- ARGV[3]    prefix of event streams
-- ARGV[4..]  queues
--
-- Returns where to go on, and the ids of the returned jobs.

local ours = {}
for i = 4, #ARGV do ours[ARGV[i]] = true end

-- Whether nobody has renewed the lease for its length and a minute more; see `extend`.
local function is_abandoned(queue, job, execution)
  return redis.call('EXISTS', executions_key(job)) == 0
    and try('ZCARD', started_key(queue))
    and not redis.call('ZSCORE', started_key(queue), member(job, execution))
end

local returned = {}
local page = redis.call('SCAN', ARGV[1], 'MATCH', job_key('*'), 'COUNT', ARGV[2])
for _, key in ipairs(page[2]) do
  local job = string.sub(key, #job_key('') + 1)
  local fields = redis.pcall('HMGET', key, 'status', 'origin', EXECUTION)
  local queue, execution = fields[2], fields[3]
  if fields[1] == 'started' and ours[queue] and execution and is_abandoned(queue, job, execution)
    and put_back_dead(queue, job, execution, ARGV[3] .. job) then
    returned[#returned + 1] = job
  end
end
return answer({page[1], returned})
