-- Remove what has expired from RQ's registries of ended jobs.
--
-- RQ never removes a cancelled job from its registry. Here its score becomes the time at which the
-- job expires, as in RQ's other registries, or that of the next look if it never does. It leaves
-- when the job is gone.
--
-- ARGV[1]  queue
-- ARGV[2]  how many entries of each registry to look at
--
-- Returns whether more may have expired.

local queue, most = ARGV[1], tonumber(ARGV[2])
local time = now()
local more = false

-- Those that never expire have the score -1, or +inf.
local function clean(registry)
  local endless = redis.call('ZCOUNT', registry, '-inf', '(0')
  local expired = math.min(redis.call('ZCOUNT', registry, 0, number(time)), most)
  if expired > 0 then
    redis.call('ZREMRANGEBYRANK', registry, endless, endless + expired - 1)
  end
  more = more or expired == most
end

local function look_again(registry, job)
  if status(job) ~= 'canceled' then
    redis.call('ZREM', registry, job)
    return
  end
  local milliseconds = redis.call('PTTL', job_key(job))
  local seconds = milliseconds > 0 and milliseconds / 1000 or 86400
  redis.call('ZADD', registry, number(time + seconds), job)
end

local function clean_cancelled(registry)
  local due = redis.call('ZRANGEBYSCORE', registry, '-inf', number(time), 'LIMIT', 0, most)
  for _, job in ipairs(due) do look_again(registry, job) end
  more = more or #due == most
end

clean(RQ .. 'finished:' .. queue)
clean(RQ .. 'failed:' .. queue)
clean_cancelled(RQ .. 'canceled:' .. queue)
return more
