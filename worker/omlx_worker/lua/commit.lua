-- End a job as RQ does, if this execution still holds it.
--
-- ARGV[1..3]  queue, job, execution
-- ARGV[4]     worker name
-- ARGV[5]     'finished', 'failed' or 'stopped'
-- ARGV[6]     the RQ result's payload: base64 of the return value, or of the zlib of the error
-- ARGV[7]     seconds to keep the job where it does not say (result_ttl or failure_ttl)
-- ARGV[8]     at most this many seconds the stream of a job without a result is kept
-- ARGV[9]     stream of events
-- ARGV[10]    channel of events
-- ARGV[11]    id of the terminal event
-- ARGV[12]    the terminal event
-- ARGV[13]    '1': leave dependents to nobody (RQ's own handlers have failed on this job)
--
-- Returns 1 when done, also by an earlier call whose answer was lost, 0 when the lease is gone, 2
-- when the job has dependents: nothing is written then, and RQ's own handlers must end it.

local queue, job, execution, worker, ending = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local payload, stream, channel = ARGV[6], ARGV[9], ARGV[10]
local key, dependents = job_key(job), job_key(job) .. ':dependents'
-- RQ's name for it, with two colons.
local dependencies = 'rq:job::' .. job .. ':dependencies'
local results, worker_key = 'rq:results:' .. job, 'rq:worker:' .. worker

local function is_done()
  local last = redis.pcall('XREVRANGE', results, '+', '-', 'COUNT', 1)
  for _, entry in ipairs(last) do
    for i = 1, #entry[2], 2 do
      if entry[2][i] == 'execution_id' then return entry[2][i + 1] == execution end
    end
  end
  return false
end

if not holds(queue, job, execution) then return is_done() and 1 or 0 end
local succeeded = ending == 'finished'
local fields = redis.call('HMGET', key, succeeded and 'result_ttl' or 'failure_ttl', 'group_id',
  'status', CRASHES, ALONE, STOP)
if not fields[3] and redis.call('EXISTS', key) == 0 then
  drop_execution(queue, job, execution)
  return 0
end
if ARGV[13] ~= '1' and redis.call('EXISTS', dependents) == 1 then return 2 end

local time, date = now()
local ttl = tonumber(fields[1])
if not ttl or not (math.abs(ttl) < 2 ^ 31) then ttl = tonumber(ARGV[7]) end
ttl = math.floor(ttl)
local started = redis.call('HGET', execution_key(job, execution), 'created_at') or number(time)

local function expire(name, seconds)
  if seconds > 0 then redis.call('EXPIRE', name, seconds) else redis.call('PERSIST', name) end
end

if ttl ~= 0 then
  write('XADD', results, 'MAXLEN', '~', 10, '*',
    'type', succeeded and '1' or '2', 'worker_name', worker,
    succeeded and 'return_value' or 'exc_string', payload, 'execution_id', execution,
    'execution_started_at', started, 'execution_ended_at', number(time))
  expire(results, ttl)
end

redis.pcall('XADD', stream, ARGV[11], 'event', ARGV[12])
redis.call('PUBLISH', channel, ARGV[12])
-- A bulk run hears of its jobs on one stream; its name is protocol.py's `ended_stream`.
local run = string.match(job, '^bulk%-(%x+)%-')
if run then
  redis.call('XADD', 'omlx:bulk:' .. run, '*', 'job', job)
  redis.call('EXPIRE', 'omlx:bulk:' .. run, 604800)
end
if ttl == 0 then
  redis.call('EXPIRE', stream, 60)
elseif succeeded then
  expire(stream, ttl)
else
  redis.call('EXPIRE', stream, ttl > 0 and math.min(ttl, tonumber(ARGV[8])) or ARGV[8])
end

if redis.call('EXISTS', worker_key) == 1 then
  redis.call('HINCRBY', worker_key, succeeded and 'successful_job_count' or 'failed_job_count', 1)
  redis.call('HINCRBYFLOAT', worker_key, 'total_working_time', number(time - tonumber(started)))
end

drop_execution(queue, job, execution)
if ttl == 0 then
  redis.call('DEL', key, dependents, dependencies, executions_key(job))
  if fields[2] and fields[2] ~= '' then redis.pcall('SREM', 'rq:group:' .. fields[2], job) end
else
  redis.call('HSET', key, 'status', ending, 'ended_at', date, 'last_heartbeat', date)
  if fields[4] or fields[5] or fields[6] then redis.call('HDEL', key, CRASHES, ALONE, STOP) end
  expire(key, ttl)
  redis.call('EXPIRE', dependencies, ttl)
  -- RQ's scores: what never expires is +inf when finished and -1 when failed.
  if succeeded then
    redis.call('ZADD', 'rq:finished:' .. queue, ttl > 0 and number(time + ttl) or '+inf', job)
  else
    redis.call('ZADD', 'rq:failed:' .. queue, ttl > 0 and number(time + ttl) or '-1', job)
  end
end
return 1
