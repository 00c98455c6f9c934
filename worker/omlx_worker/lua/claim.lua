-- Take up to `limit` jobs over all queues, the first queue first, and start them.
--
-- KEYS       names of queues, best first (names, not keys)
-- ARGV[1]    limit
-- ARGV[2]    worker name
-- ARGV[3]    lease in seconds
-- ARGV[4]    grace in seconds, see `extend`
-- ARGV[5]    prefix of event streams
-- ARGV[6..]  execution ids, one for each job that may be taken
--
-- Returns nil while workers are suspended, else for each job
--   {job, execution, queue, started at, tokens already in its stream, data, timeout, needs RQ}

if redis.call('EXISTS', 'rq:suspended') == 1 then return false end

local limit, worker = tonumber(ARGV[1]), ARGV[2]
local lease, grace, events = tonumber(ARGV[3]), tonumber(ARGV[4]), ARGV[5]
local time, date = now()
local skips_left = 1000
local claimed = {}

local function filled(value) return value and value ~= '' and value ~= '0' and value ~= '[]' end

-- An id that must not run: not one of RQ's, no such job any more, ended, or pushed twice.
local function is_stale(job, fields)
  if not string.match(job, '^[%w_-]+$') then return true end
  if fields.err or not fields[1] then return true end
  local state = fields[2]
  if state == 'finished' or state == 'canceled' or state == 'stopped' then return true end
  if state ~= 'started' then return false end
  for _, queue in ipairs(KEYS) do
    for _, execution in ipairs(redis.call('ZRANGE', executions_key(job), 0, -1)) do
      if holds(queue, job, execution) then return true end
    end
  end
  return false
end

-- How many tokens an interrupted run left in the stream. A stream that has ended is of an earlier
-- run (requeued, retried, repeated): this run starts a new one.
local function streamed(job)
  local last = redis.pcall('XREVRANGE', events .. job, '+', '-', 'COUNT', 1)
  if last.err or not last[1] then
    if last.err then redis.call('DEL', events .. job) end
    return 0
  end
  local tokens, part = string.match(last[1][1], '^(%d+)-(%d+)$')
  if part == '0' then return tonumber(tokens) end
  redis.call('DEL', events .. job)
  return 0
end

for _, queue in ipairs(KEYS) do
  while #claimed < limit and skips_left > 0 do
    local job = redis.call('LINDEX', queue_key(queue), 0)
    if not job then break end
    local fields = redis.pcall('HMGET', job_key(job), 'data', 'status', 'timeout',
      'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
      'webhooks', 'retries_left', 'repeats_left')
    if is_stale(job, fields) then
      skips_left = skips_left - 1
    else
      local execution = ARGV[6 + #claimed]
      redis.call('HSET', job_key(job), 'status', 'started', 'worker_name', worker,
        'started_at', date, 'last_heartbeat', date)
      redis.call('PERSIST', job_key(job))
      redis.call('HSET', execution_key(job, execution), 'id', execution,
        'created_at', number(time), 'last_heartbeat', number(time), 'worker_name', worker)
      extend(queue, job, execution, time, lease, grace)
      local needs_rq = filled(fields[4]) or filled(fields[5]) or filled(fields[6])
        or filled(fields[7]) or filled(fields[8]) or filled(fields[9])
      claimed[#claimed + 1] = {job, execution, queue, number(time), streamed(job),
        fields[1], fields[3] or '', needs_rq and 1 or 0}
    end
    redis.call('LPOP', queue_key(queue))
  end
end
return claimed
