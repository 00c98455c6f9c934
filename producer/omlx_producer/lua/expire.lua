-- Start jobs that have waited longer than their completion windows, by the server's clock, whatever
-- model they are for. The caller fails them. A job whose lease has passed is one of a dead worker, or
-- of an earlier call; it is started anew.
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
local worker, lease, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time, date = now()
local started = {}

local function start(queue, job)
  local execution = ARGV[4] .. string.format('%04x', #started)
  start_execution(queue, job, execution, #started, worker, time, date, lease, grace)
  redis.call('LREM', queue_key(queue), 1, job)
  started[#started + 1] = {job, execution, queue, tokens_in(events_key(job))}
end

local function look_after(seconds, job)
  redis.call('ZADD', EXPIRING_KEY, number(time + seconds), job)
end

local function expire(job)
  local state, queue, execution = unpack(
    redis.call('HMGET', job_key(job), 'status', 'origin', EXECUTION))
  if state == 'started' then
    local ends = queue and execution
      and redis.call('ZSCORE', started_key(queue), member(job, execution))
    if not ends or tonumber(ends) > time + grace then return look_after(AGAIN, job) end
    put_back(queue, job, execution)
  elseif state ~= 'queued' or not queue then
    return redis.call('ZREM', EXPIRING_KEY, job)
  end
  start(queue, job)
  look_after(lease, job)
end

local due = redis.call('ZRANGEBYSCORE', EXPIRING_KEY, '-inf', number(time), 'LIMIT', 0, MOST)
for _, job in ipairs(due) do expire(job) end
return {started, #due == MOST and 1 or 0}
