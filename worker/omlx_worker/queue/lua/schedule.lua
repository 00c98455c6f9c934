-- Move jobs to their queues: scheduled ones that are due, as RQ's scheduler does, and dependents that
-- are ready. Scheduled jobs of a queue whose lock a scheduler holds are left to that scheduler.
--
-- KEYS     names of queues (names, not keys)
-- ARGV[1]  most jobs to move for one queue
--
-- A job whose rate limit has no free slot waits for the end of a job that holds one.
--
-- Returns the ids of the moved jobs.

local time, date = now()
local moved = {}

local awaited = {scheduled = true, created = true, ready_to_enqueue = true}

-- Returns false if a shared key is of another type; the job then stays where it is.
local function enqueue(queue, job)
  local fields = redis.pcall('HMGET', job_key(job), 'status', 'ttl', 'ended_at',
    'enqueue_at_front', 'enqueue_at_front_on_retry', 'rate_limit_key', 'rate_limit_concurrency')
  -- Deleted, cancelled, or already enqueued.
  if fields.err or not awaited[fields[1]] then return true end
  local has_run = fields[3] and fields[3] ~= ''
  local at_front = fields[4] == '1' or (has_run and fields[5] == '1')
  local limit, concurrency = fields[6], tonumber(fields[7] or '')
  local config = limit and limit ~= '' and concurrency and RQ .. 'rl:' .. limit
  local taken = config and try('ZCARD', config .. ':allowed')
  if config then
    if not taken then return false end
    try('SADD', RQ .. 'rl-keys', limit)
    try('HSET', config, 'concurrency', concurrency)
  end
  if config and taken >= concurrency then
    if not try('ZADD', config .. ':rate_limited', number(time), job) then return false end
    redis.call('HSET', job_key(job), 'status', 'rate_limited', 'enqueue_at_front', at_front and 1 or 0)
  else
    if not try(at_front and 'LPUSH' or 'RPUSH', queue_key(queue), job) then return false end
    if config then redis.call('ZADD', config .. ':allowed', number(time), job) end
    redis.call('HSET', job_key(job), 'status', 'queued', 'enqueued_at', date)
  end
  local ttl = tonumber(fields[2] or '')
  if ttl and ttl > 0 and ttl < 2 ^ 31 then redis.call('EXPIRE', job_key(job), math.floor(ttl)) end
  moved[#moved + 1] = job
  return true
end

local function move(queue, registry, jobs)
  for _, job in ipairs(jobs or {}) do
    if enqueue(queue, job) then redis.call('ZREM', registry, job) end
  end
end

for _, queue in ipairs(KEYS) do
  if redis.call('EXISTS', RQ .. 'scheduler-lock:' .. queue) == 0 then
    local scheduled = RQ .. 'scheduled:' .. queue
    move(queue, scheduled,
      try('ZRANGEBYSCORE', scheduled, '-inf', number(time), 'LIMIT', 0, ARGV[1]))
  end
  -- RQ enqueues them after the transaction that made them ready, and may have been interrupted.
  local ready = RQ .. 'ready:' .. queue
  move(queue, ready, try('ZRANGE', ready, 0, ARGV[1] - 1))
end
return answer(moved)
