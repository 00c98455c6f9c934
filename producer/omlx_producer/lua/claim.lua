-- Take up to `limit` jobs over all queues, the first queue first, and start them.
--
-- After the jobs of a queue come rows of the open batches for that queue, the least recently served
-- batch first. A row becomes a job when it is taken.
--
-- A job whose workers have died is a suspect and runs alone; see omlx_worker.queue.quarantine. A
-- worker that holds nothing takes it and nothing else. A worker that holds jobs stops in front of it.
--
-- KEYS       names of queues, best first (names, not keys)
-- ARGV[1]    limit
-- ARGV[2]    worker name
-- ARGV[3]    lease in seconds
-- ARGV[4]    grace in seconds, see `extend`
-- ARGV[5]    longest payload in bytes; of a longer one only the length is returned
-- ARGV[6]    deaths that make a job a suspect
-- ARGV[7]    deaths that convict it
-- ARGV[8]    number of jobs that the worker holds
-- ARGV[9]   id of this claim, the prefix of execution ids; the same if the claim is repeated after
--            a lost answer
-- ARGV[10]   the latest version of payloads that the worker knows; newer ones are left to others
--
-- Returns nil while workers or their model are paused, else
--   {the queue in which a suspect waits for this worker, or '', jobs,
--    a job or the run of a batch that is too new, or ''}, and for each job
--   {job, execution, queue, started at, tokens in its stream, data, bytes of data, timeout,
--    a field that is not supported or '', deaths, 'run', 'alone', 'stop' or 'fail', enqueued at,
--    run, number, digest and custom_id of a batch's row, or ''}

local limit, worker = tonumber(ARGV[1]), ARGV[2]
local lease, grace = tonumber(ARGV[3]), tonumber(ARGV[4])
local longest, suspicious, convicting = tonumber(ARGV[5]), tonumber(ARGV[6]), tonumber(ARGV[7])
local held = tonumber(ARGV[8])
local time, date = now()
local looks_left, bytes_left = 1000, longest
local claimed = {}
local known, newer = tonumber(ARGV[10]), ''
-- The queue in which a suspect waits, and whether nothing is taken after it.
local suspect_in, is_over = '', false

local function has_room() return not is_over and #claimed < limit and bytes_left > 0 end

-- The worker does not know the jobs that the first call of a repeated claim took.
local claim, last_claim = ARGV[9], claim_key(worker)

local function undo_last()
  local taken = redis.call('LRANGE', last_claim, 0, -1)
  if taken[1] == claim then
    for i = #taken - 2, 2, -3 do
      give_back(taken[i], taken[i + 1], taken[i + 2])
    end
  end
  if taken[1] then redis.call('DEL', last_claim) end
end

local function is_paused()
  local model = string.match(KEYS[1] or '', '^omlx:([^:]+):')
  return model and redis.call('SISMEMBER', PAUSED_KEY, model) == 1
end

undo_last()
if redis.call('EXISTS', RQ .. 'suspended') == 1 or is_paused() then return false end

local function remember(queue, job, execution)
  if #claimed == 0 then
    redis.call('RPUSH', last_claim, claim)
    redis.call('EXPIRE', last_claim, math.ceil(lease))
  end
  redis.call('RPUSH', last_claim, queue, job, execution)
end

-- RQ's features that would make a worker call code or hosts of a producer's choice, or run a job
-- more than once for one submission, and what only RQ's own workers do. `read` returns their fields
-- last.
local UNSUPPORTED = {'success_callback_name', 'failure_callback_name', 'stopped_callback_name',
  'webhooks', 'repeats_left', 'rate_limit_key', 'retry_intervals', 'dependency_ids'}
local UNSET = {[''] = true, ['0'] = true, ['[]'] = true, ['[0]'] = true}

local function unsupported(job, fields)
  for i, name in ipairs(UNSUPPORTED) do
    local value = fields[8 + i]
    if value and not UNSET[value] then return name end
  end
  return redis.call('EXISTS', job_key(job) .. ':dependents') == 1 and 'dependents' or ''
end

local function read(job)
  return redis.call('HMGET', job_key(job), 'status', 'timeout', DEATHS, STOP_FIELD, 'data',
    'enqueued_at', ROW, WIRE_FIELD, unpack(UNSUPPORTED))
end

-- An id that must not run: not RQ's, deleted, ended, or pushed twice.
local function is_stale(job, fields)
  if not string.match(job, '^[%w_-]+$') then return true end
  local state = fields[1]
  if not state then return redis.call('EXISTS', job_key(job)) == 0 end
  if ENDED[state] then return true end
  if state ~= 'started' then return false end
  local executions = redis.call('ZRANGE', executions_key(job), 0, -1)
  for _, queue in ipairs(KEYS) do
    for _, execution in ipairs(executions) do
      if holds(queue, job, execution) then return true end
    end
  end
  return false
end

-- Whether a newer producer has written the payload.
local function is_newer(version) return as_count(version) > known end

local function count_deaths(fields)
  local _, count = string.gsub(fields[3] or '', '%S+', '')
  return count
end

-- How to treat a job. Jobs to be stopped or failed do not run, so they need not be alone.
local function treatment(fields)
  if fields[4] then return 'stop' end
  local deaths = count_deaths(fields)
  return deaths >= convicting and 'fail' or deaths >= suspicious and 'alone' or 'run'
end

-- The number of tokens that an interrupted run left in the stream. A stream that has ended belongs
-- to an earlier run (requeued): this run starts a new one.
local function streamed(job)
  local tokens, part = string.match(last_id(events_key(job)) or '', '^(%d+)-(%d+)$')
  if part == '0' then return tonumber(tokens) end
  redis.call('DEL', events_key(job))
  return 0
end

local function start(queue, job, fields)
  local key, execution = job_key(job), claim .. string.format('%04x', #claimed)
  remember(queue, job, execution)
  local data, tokens = fields[5] or '', streamed(job)
  local bytes = #data
  if bytes > longest then data = '' end
  bytes_left = bytes_left - #data
  start_execution(queue, job, execution, #claimed, worker, time, date, lease, grace)
  if tokens > 0 then redis.call('HSET', key, STREAMED, tokens)
  else redis.call('HDEL', key, STREAMED) end
  claimed[#claimed + 1] = {job, execution, queue, number(time), tokens, data, bytes,
    fields[2] or '', unsupported(job, fields), count_deaths(fields), treatment(fields), fields[6] or '',
    fields[7] or ''}
end

-- Fail an entry that is no row: somebody has written it by hand.
local function drop_row(queue, run, entry)
  fail_first(queue, run, entry, string.match(entry, '^[%w-]*'), string.rep('0', 24), 'null',
    'unparsable', 'Redis holds no row there; submit it again')
end

-- Make a job of a waiting row, and start it.
local function take_row(queue, run, entry)
  local ending = string.find(entry, '\n', 1, true)
  local row, created = string.match(entry, '^(%S+) %S+ (%S+) [^\n]+\n')
  if not row then return drop_row(queue, run, entry) end
  local key, job = batch_key(run), row_job(run, row)
  redis.call('HSET', batch_running_key(run, queue), row, entry)
  redis.call('HSET', job_key(job), 'status', 'queued', 'origin', queue, 'enqueued_at', date,
    'created_at', created or date,
    'timeout', redis.call('HGET', key, 'job_timeout') or '', 'result_ttl', 0, 'failure_ttl', 0,
    'description', 'row ' .. row .. ' of batch-' .. run,
    WIRE_FIELD, redis.call('HGET', key, WIRE_FIELD) or 1,
    ROW, run .. ' ' .. string.sub(entry, 1, ending - 1), 'data', string.sub(entry, ending + 1))
  start(queue, job, read(job))
  redis.call('LPOP', batch_waiting_key(run, queue))
end

local function take_rows_of(queue, run)
  local entry = redis.call('LINDEX', batch_waiting_key(run, queue), 0)
  local too_new = is_newer(redis.call('HGET', batch_key(run), WIRE_FIELD))
  if too_new then newer = run end
  while entry and not too_new and has_room() do
    take_row(queue, run, entry)
    entry = redis.call('LINDEX', batch_waiting_key(run, queue), 0)
  end
  if not entry then redis.call('ZREM', open_key(queue), run) end
end

local function take_rows(queue)
  local served = {}
  while has_room() do
    local run = redis.call('ZRANGE', open_key(queue), 0, 0)[1]
    if not run or served[run] then return end
    served[run] = true
    put_behind(queue, run, 'CH')
    take_rows_of(queue, run)
  end
end

-- Take the job at a place of a queue, if it is its turn. Returns whether it has left the queue.
local function take(queue, job)
  local fields = read(job)
  if is_stale(job, fields) then
    looks_left = looks_left - 1
  elseif is_newer(fields[8]) then
    newer = job
    return false
  else
    is_over = treatment(fields) == 'alone'
    if is_over and held + #claimed > 0 then
      suspect_in = queue
      return false
    end
    start(queue, job, fields)
  end
  redis.call('LREM', queue_key(queue), 1, job)
  return true
end

local function take_from(queue)
  local index = 0
  while has_room() and looks_left > 0 do
    local job = redis.call('LINDEX', queue_key(queue), index)
    if not job then break end
    if not take(queue, job) then
      looks_left, index = looks_left - 1, index + 1
    end
  end
  take_rows(queue)
end

for _, queue in ipairs(KEYS) do
  if has_room() then take_from(queue) end
end
return {suspect_in, claimed, newer}
