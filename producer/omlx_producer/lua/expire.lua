-- Start jobs that have waited longer than their completion windows, by the server's clock, whatever
-- model they are for. The caller fails them.
--
-- ARGV[1]    worker name
-- ARGV[2]    lease in seconds
-- ARGV[3]    grace in seconds, see `extend`
-- ARGV[4]    id of this call, the prefix of execution ids
-- ARGV[5]    how many jobs to look at
--
-- Returns the jobs, each as {job, execution, queue, tokens in its stream}, and whether more is due.

local MOST = tonumber(ARGV[5])
local AGAIN = 10  -- seconds until the next look at what runs
local worker = ARGV[1]
local time, date = now()
local started = {}

local function expire(job)
  local state, queue = unpack(redis.call('HMGET', job_key(job), 'status', 'origin'))
  if state == 'started' then return redis.call('ZADD', EXPIRING_KEY, number(time + AGAIN), job) end
  if state == 'queued' and queue then
    local execution = ARGV[4] .. string.format('%04x', #started)
    extend(queue, job, execution, time, tonumber(ARGV[2]), tonumber(ARGV[3]),
      'id', execution, 'created_at', number(time), 'worker_name', worker)
    redis.call('HSET', job_key(job), 'status', 'started', 'worker_name', worker,
      EXECUTION, execution, 'started_at', date, 'last_heartbeat', date)
    redis.call('PERSIST', job_key(job))
    redis.call('LREM', queue_key(queue), 1, job)
    started[#started + 1] = {job, execution, queue, tokens_in(events_key(job))}
  end
  redis.call('ZREM', EXPIRING_KEY, job)
end

local due = redis.call('ZRANGEBYSCORE', EXPIRING_KEY, '-inf', number(time), 'LIMIT', 0, MOST)
for _, job in ipairs(due) do expire(job) end
return {started, #due == MOST and 1 or 0}
