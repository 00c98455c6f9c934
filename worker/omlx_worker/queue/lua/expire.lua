-- End what has waited longer than its completion window, by the server's clock, whatever model it
-- is for. Rows of batches end here. Jobs are started for the caller, who fails them.
--
-- KEYS[1]    members 'job:<id>' and 'batch:<run>' by the time at which they are due
-- ARGV[1]    worker name
-- ARGV[2]    lease in seconds
-- ARGV[3]    grace in seconds, see `extend`
-- ARGV[4]    id of this call, the prefix of execution ids
-- ARGV[5]    prefix of event streams
-- ARGV[6]    why they end, a sentence for JSON
-- ARGV[7]    how many jobs and rows to look at
--
-- Returns the jobs, each as {job, execution, queue, tokens in its stream}, and whether more is due.

local MOST = tonumber(ARGV[7])
local AGAIN = 10  -- seconds until the next look at what runs
local due, worker = KEYS[1], ARGV[1]
local time, date = now()
local started, looked = {}, 0

local function expire_job(entry, job)
  local fields = redis.call('HMGET', job_key(job), 'status', 'origin')
  local queue = fields[2]
  if fields[1] == 'started' then return end
  if fields[1] == 'queued' and queue then
    local execution = ARGV[4] .. string.format('%04x', #started)
    extend(queue, job, execution, time, tonumber(ARGV[2]), tonumber(ARGV[3]),
      'id', execution, 'created_at', number(time), 'worker_name', worker)
    redis.call('HSET', job_key(job), 'status', 'started', 'worker_name', worker,
      EXECUTION, execution, 'started_at', date, 'last_heartbeat', date)
    redis.call('PERSIST', job_key(job))
    redis.call('LREM', queue_key(queue), 1, job)
    started[#started + 1] = {job, execution, queue, tokens_in(ARGV[5] .. job)}
  else
    redis.call('ZREM', due, entry)
  end
end

-- Rows of a queue were uploaded one after another, so the first one is due first.
local function expire_rows(run, queue, before)
  local entry = redis.call('LINDEX', waiting_key(run, queue), 0)
  while entry and looked < MOST do
    local row, digest, created, custom_id = string.match(entry, '^(%S+) (%x+) (%S+) ([^\n]*)')
    if not row or created > before then return end
    looked = looked + 1
    redis.call('HSET', running_key(run, queue), row, entry)
    redis.call('LPOP', waiting_key(run, queue))
    fail_row(queue, run, row, digest, custom_id, 'expired', ARGV[6])
    entry = redis.call('LINDEX', waiting_key(run, queue), 0)
  end
  if not entry then redis.call('ZREM', open_key(queue), run) end
end

local function expire_batch(entry, run)
  local fields = redis.call('HMGET', batch_key(run), 'window', 'queues')
  local window = tonumber(fields[1] or '')
  if window then
    local _, before = now(time - window)
    for queue in string.gmatch(fields[2] or '', '%S+') do
      expire_rows(run, queue, before)
    end
  end
  if not window or not redis.call('ZSCORE', BATCHES, run) then
    return redis.call('ZREM', due, entry)
  end
  local wait = looked < MOST and math.max(1, math.min(60, window / 100)) or 0
  redis.call('ZADD', due, number(time + wait), entry)
end

for _, entry in ipairs(redis.call('ZRANGEBYSCORE', due, '-inf', number(time), 'LIMIT', 0, MOST)) do
  if looked >= MOST then break end
  looked = looked + 1
  redis.call('ZADD', due, number(time + AGAIN), entry)
  local kind, id = string.match(entry, '^(%a+):(.*)$')
  if kind == 'job' then expire_job(entry, id)
  elseif kind == 'batch' then expire_batch(entry, id)
  else redis.call('ZREM', due, entry) end
end
return {started, looked >= MOST and 1 or 0}
