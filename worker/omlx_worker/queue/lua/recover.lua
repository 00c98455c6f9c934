-- Put jobs back that read as started and run nowhere, or as queued and are in no queue. An operator
-- may have deleted RQ's registry, without which sweep.lua does not find the jobs of workers that
-- died, or a queue. A long queue is not searched for its jobs.
--
-- KEYS[1]    where the last call ended
-- ARGV[1]    the longest queue that is searched
-- ARGV[2]    how many of the server's keys to look at, about
-- ARGV[3]    how many jobs to put back at most; the next call goes on at the same keys
-- ARGV[4]    prefix of event streams
-- ARGV[5..]  queues
--
-- Returns {ids of the returned jobs, whether it has come to the last of the server's keys}.

local ours = {}
for i = 5, #ARGV do ours[ARGV[i]] = true end

-- Whether nobody has renewed the lease for its length and a minute more; see `extend`.
local function is_abandoned(queue, job, execution)
  return redis.call('EXISTS', executions_key(job)) == 0
    and not redis.call('ZSCORE', started_key(queue), member(job, execution))
end

local function is_missing(queue, job)
  return redis.call('LLEN', queue_key(queue)) <= tonumber(ARGV[1])
    and not redis.call('LPOS', queue_key(queue), job)
end

local returned = {}

local function mend(key)
  local job = string.sub(key, #job_key('') + 1)
  local fields = redis.call('HMGET', key, 'status', 'origin', EXECUTION)
  local queue, execution = fields[2], fields[3]
  if fields[1] == 'started' and ours[queue] and execution and is_abandoned(queue, job, execution)
    and put_back_dead(queue, job, execution, ARGV[4] .. job) then
    returned[#returned + 1] = job
  elseif fields[1] == 'queued' and ours[queue] and is_missing(queue, job) then
    redis.call('LPUSH', queue_key(queue), job)
    returned[#returned + 1] = job
  end
end

local page = redis.call('SCAN', redis.call('GET', KEYS[1]) or '0', 'MATCH', job_key('*'),
  'COUNT', ARGV[2], 'TYPE', 'hash')
for _, key in ipairs(page[2]) do
  if #returned == tonumber(ARGV[3]) then return {returned, 0} end
  attempt(mend, key)
end
redis.call('SET', KEYS[1], page[1], 'EX', 86400)
return {returned, page[1] == '0' and 1 or 0}
