-- End jobs as RQ does, each independently, if the execution still holds the job.
--
-- ARGV[1]     worker name
-- ARGV[2]     seconds until the stream of a job that did not finish expires, at most
-- ARGV[3..]   for each job: queue, job, execution,
--             'finished', 'failed' or 'stopped', or 'retry': failed, unless RQ's `Retry` applies,
--             the RQ result's payload: base64 of the return value, or of the zlib of the error,
--             seconds to keep the job if it has no result_ttl or failure_ttl,
--             id of the terminal event, the terminal event, tokens published,
--             of a batch's row: run, number, output line and counts, see `settle_row`; else ''
--
-- Returns for each job: 1 if done, also by an earlier call whose answer was lost; 0 if the lease is
-- gone; 2 if the server has lost tokens of the job, and nothing is written; 3 if the job is retried; or
-- the error of the command that Redis refused.

local worker, longest = ARGV[1], ARGV[2]
local time, date = now()
local ended_at = number(time)
local succeeded_count, failed_count, working = 0, 0, 0

-- A job that keeps no result has its last event for a minute; see `announce`.
local function is_done(job, execution, id, event)
  local last = redis.call('XREVRANGE', RQ .. 'results:' .. job, '+', '-', 'COUNT', 1)
  for _, entry in ipairs(last) do
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'execution_id' then return entry[2][i + 1] == execution end
    end
  end
  return is_written(job, id, event)
end

local function expire(name, seconds)
  if seconds > 0 then redis.call('EXPIRE', name, seconds) else redis.call('PERSIST', name) end
end

-- The result as RQ stores it, with the code, field and remedy of an end without an answer.
local function result_of(succeeded, payload, event)
  if succeeded then return 'return_value', payload end
  local failure = cjson.decode(event)
  return 'exc_string', payload, 'code', failure.code, 'field', failure.field, 'remedy', failure.remedy
end

local function add_result(job, execution, succeeded, payload, event, started, ttl)
  local results = RQ .. 'results:' .. job
  redis.call('XADD', results, 'MAXLEN', '~', 10, '*',
    'type', succeeded and '1' or '2', 'worker_name', worker, 'execution_id', execution,
    'execution_started_at', number(started), 'execution_ended_at', ended_at,
    result_of(succeeded, payload, event))
  if ttl > 0 then redis.call('EXPIRE', results, ttl) end
end

-- The last writes: nothing is published that is not committed.
local function announce(job, id, event, succeeded, ttl)
  local stream = events_key(job)
  redis.pcall('XADD', stream, id, 'event', event)
  redis.call('PUBLISH', tokens_channel(job), event)
  if ttl == 0 then
    redis.call('EXPIRE', stream, 60)
  elseif succeeded then
    expire(stream, ttl)
  else
    redis.call('EXPIRE', stream, ttl > 0 and math.min(ttl, tonumber(longest)) or longest)
  end
end

-- Give a failed job another try. Returns false if it has none left.
local function retry(queue, job, execution)
  local fields = redis.call('HMGET', job_key(job), 'retries_left', 'enqueue_at_front_on_retry', 'ttl')
  local left = tonumber(fields[1] or '') or 0
  if left < 1 then return false end
  redis.call(fields[2] == '1' and 'LPUSH' or 'RPUSH', queue_key(queue), job)
  redis.call('HSET', job_key(job), 'status', 'queued', 'enqueued_at', date, 'retries_left', left - 1,
    'started_at', '', 'worker_name', '', 'ended_at', date)
  local ttl = tonumber(fields[3] or '')
  if ttl and ttl > 0 and ttl < 2 ^ 31 then redis.call('EXPIRE', job_key(job), math.floor(ttl)) end
  redis.call('HDEL', job_key(job), DEATHS, STREAMED)
  drop_execution(queue, job, execution)
  return true
end

local function commit(queue, job, execution, ending, payload, default_ttl, id, event, published,
    run, row, line, counts)
  if not holds(queue, job, execution) then
    local done = run ~= '' and redis.call('HEXISTS', batch_results_key(run), row) == 1
    if done or is_done(job, execution, id, event) then return 1 end
    refuse(job, execution)
    return 0
  end
  if ending == 'retry' then
    if retry(queue, job, execution) then
      failed_count = failed_count + 1
      return 3
    end
    ending = 'failed'
  end
  local key = job_key(job)
  local succeeded = ending == 'finished'
  local fields = redis.call('HMGET', key, succeeded and 'result_ttl' or 'failure_ttl', 'group_id',
    'status', DEATHS, STREAMED, STOP_FIELD)
  if not fields[3] and redis.call('EXISTS', key) == 0 then
    drop_execution(queue, job, execution)
    return 0
  end
  if is_behind(events_key(job), published) then return 2 end

  local ttl = tonumber(fields[1])
  if not ttl or not (math.abs(ttl) < 2 ^ 31) then ttl = tonumber(default_ttl) end
  ttl = math.floor(ttl)
  local started = tonumber(redis.call('HGET', execution_key(job, execution), 'created_at') or '')
  -- Anybody can write what is no time.
  if not (started and started >= 0 and started <= time) then started = time end
  if ttl ~= 0 then add_result(job, execution, succeeded, payload, event, started, ttl) end

  if ttl == 0 then
    redis.call('DEL', key, executions_key(job))
    if fields[2] and fields[2] ~= '' then redis.call('SREM', RQ .. 'group:' .. fields[2], job) end
  else
    redis.call('HSET', key, 'status', ending, 'ended_at', date, 'last_heartbeat', date)
    if fields[4] or fields[5] or fields[6] then
      redis.call('HDEL', key, DEATHS, STREAMED, STOP_FIELD)
    end
    expire(key, ttl)
    -- RQ's scores of jobs that never expire: +inf if finished, -1 if failed.
    if succeeded then
      redis.call('ZADD', RQ .. 'finished:' .. queue, ttl > 0 and number(time + ttl) or '+inf', job)
    else
      redis.call('ZADD', RQ .. 'failed:' .. queue, ttl > 0 and number(time + ttl) or '-1', job)
    end
  end
  drop_execution(queue, job, execution)
  announce(job, id, event, succeeded, ttl)
  if run ~= '' then settle_row(queue, run, row, line, counts) end
  if succeeded then succeeded_count = succeeded_count + 1 else failed_count = failed_count + 1 end
  working = working + time - started
  return 1
end

local replies = {}
for i = 3, #ARGV, 13 do
  local ran, reply = pcall(commit, unpack(ARGV, i, i + 12))
  if not ran and type(reply) ~= 'table' then reply = {err = 'ERR ' .. tostring(reply)} end
  replies[#replies + 1] = reply
end

-- Figures for `rq info`.
local worker_key = RQ .. 'worker:' .. worker
if succeeded_count + failed_count > 0 and redis.call('EXISTS', worker_key) == 1 then
  redis.call('HINCRBY', worker_key, 'successful_job_count', succeeded_count)
  redis.call('HINCRBY', worker_key, 'failed_job_count', failed_count)
  redis.call('HINCRBYFLOAT', worker_key, 'total_working_time', number(working))
end
return replies
