-- Precedes every script: RQ's key names, RQ's date format, leases, and the way back to a queue.
-- Before it come RQ, the prefix of RQ's keys, names of omlx_producer.wire.keys, and ENDED, RQ's statuses of
-- jobs that have ended.
--
-- Scripts check first and remove last. Redis does not roll back a script that fails half way (out
-- of memory, read only). So a job leaves one place only after it was written to the next.

local function job_key(job) return RQ .. 'job:' .. job end
local function queue_key(queue) return RQ .. 'queue:' .. queue end
local function started_key(queue) return RQ .. 'wip:' .. queue end
local function executions_key(job) return RQ .. 'executions:' .. job end
local function execution_key(job, execution) return RQ .. 'execution:' .. job .. ':' .. execution end
local function member(job, execution) return job .. ':' .. execution end

local function row_job(run, number) return 'row-' .. run .. '-' .. number end

-- More of this project's fields in RQ's job hash. RQ keeps unknown fields.
local DEATHS = 'omlx_deaths'    -- the executions that died while it produced nothing, a space after each
local STREAMED = 'omlx_streamed'  -- the tokens in its stream at its last claim; absent for 0
local EXECUTION = 'omlx_execution'  -- the last execution that claimed it
local ROW = 'omlx_row'          -- of a batch's row: run, number, digest and custom_id

-- The time, now or at seconds since 1970: those seconds, and RQ's format in job hashes.
local function now(at)
  local time = at and {math.floor(at), math.floor(at % 1 * 1000000)} or redis.call('TIME')
  local seconds, micros = tonumber(time[1]), tonumber(time[2])
  -- Days to year, month, day: Howard Hinnant, "chrono-compatible low-level date algorithms".
  local z = math.floor(seconds / 86400) + 719468
  local era = math.floor(z / 146097)
  local doe = z - era * 146097
  local yoe = math.floor(
    (doe - math.floor(doe / 1460) + math.floor(doe / 36524) - math.floor(doe / 146096)) / 365)
  local doy = doe - (365 * yoe + math.floor(yoe / 4) - math.floor(yoe / 100))
  local mp = math.floor((5 * doy + 2) / 153)
  local month = mp < 10 and mp + 3 or mp - 9
  local year = yoe + era * 400 + (month <= 2 and 1 or 0)
  local date = string.format('%04d-%02d-%02dT%02d:%02d:%02d.%06dZ',
    year, month, doy - math.floor((153 * mp + 2) / 5) + 1,
    math.floor(seconds / 3600) % 24, math.floor(seconds / 60) % 60, seconds % 60, micros)
  return seconds + micros / 1000000, date
end

local function number(value) return string.format('%.6f', value) end

-- Whether this execution still holds its job. RQ's cancel and delete end a lease too.
--
-- Without its entry in the registry, which an operator may have deleted, a running job and its
-- execution must name each other. Whoever takes the job away ends that.
local function holds(queue, job, execution)
  if redis.call('ZSCORE', started_key(queue), member(job, execution)) then return true end
  local fields = redis.call('HMGET', job_key(job), 'status', EXECUTION, 'worker_name')
  return fields[1] == 'started' and fields[2] == execution and fields[3]
    and fields[3] == redis.call('HGET', execution_key(job, execution), 'worker_name')
end

-- Why a lease is gone: the job's status, or 'deleted'.
local function status(job)
  return redis.call('HGET', job_key(job), 'status') or 'deleted'
end

-- Refuse a call of an execution whose lease is gone; returns why. Its worker was away and lives, so
-- its death no longer counts.
local function refuse(job, execution)
  local died = redis.call('HGET', job_key(job), DEATHS) or ''
  local first, last = string.find(died, execution .. ' ', 1, true)
  if first then
    redis.call('HSET', job_key(job), DEATHS,
      string.sub(died, 1, first - 1) .. string.sub(died, last + 1))
  end
  return status(job)
end

-- The id of a stream's last entry; nil without one.
local function last_id(stream)
  local last = redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)
  return last[1] and last[1][1]
end

-- The tokens in a job's stream.
local function tokens_in(stream)
  return tonumber(string.match(last_id(stream) or '0', '^%d+'))
end

-- Whether a stream has fewer tokens than were written. A killed server may come back without the
-- last entries that it acknowledged.
local function is_behind(stream, written)
  return tonumber(written) > 0 and tokens_in(stream) < tonumber(written)
end

-- A call that is repeated after a lost answer finds its own entry.
local function is_written(job, id, event)
  local entry = redis.call('XRANGE', events_key(job), id, id)[1]
  return entry and entry[2][2] == event
end

-- Write or renew the end of a lease, and more fields of the execution. RQ's clean-up, which even
-- `rq info` runs, fails started jobs whose score has passed. So the score is `grace` seconds later,
-- and sweep.lua subtracts them.
local function extend(queue, job, execution, time, lease, grace, ...)
  local ttl = math.ceil(lease)
  redis.call('ZADD', executions_key(job), number(time + ttl + 60), execution)
  redis.call('EXPIRE', executions_key(job), ttl + 60)
  redis.call('HSET', execution_key(job, execution), 'last_heartbeat', number(time), ...)
  -- It outlives the entry above: RQ raises if it finds the entry without the hash.
  redis.call('EXPIRE', execution_key(job, execution), ttl + 120)
  redis.call('ZADD', started_key(queue), number(time + lease + grace), member(job, execution))
end

-- Give a job to an execution. Of several in one call, `index` from 0 makes each lease end a
-- microsecond later: sweep.lua goes by the time.
local function start_execution(queue, job, execution, index, worker, time, date, lease, grace)
  extend(queue, job, execution, time + index / 1000000, lease, grace,
    'id', execution, 'created_at', number(time), 'worker_name', worker)
  redis.call('HSET', job_key(job), 'status', 'started', 'worker_name', worker,
    EXECUTION, execution, 'started_at', date, 'last_heartbeat', date)
  redis.call('PERSIST', job_key(job))
end

local function drop_execution(queue, job, execution)
  redis.call('ZREM', executions_key(job), execution)
  redis.call('DEL', execution_key(job, execution))
  redis.call('ZREM', started_key(queue), member(job, execution))
end

-- Put a job back at the front of its queue, unless it was deleted or has ended.
local function put_back(queue, job, execution)
  local returned = status(job) == 'started'
  if returned then
    redis.call('LPUSH', queue_key(queue), job)
    redis.call('HSET', job_key(job), 'status', 'queued', 'started_at', '', 'worker_name', '')
  end
  drop_execution(queue, job, execution)
  return returned
end

local function give_back(queue, job, execution)
  if holds(queue, job, execution) then return put_back(queue, job, execution) end
  refuse(job, execution)
  return false
end

-- A count in a job's hash. Anybody can write what is no number.
local function as_count(text)
  local count = tonumber(text or '') or 0
  return count > 0 and math.floor(math.min(count, 2 ^ 53)) or 0
end

-- Put back a job whose worker has died, or was away for as long as its lease. The death counts if
-- the job has produced nothing since it was claimed, until `refuse`; see omlx_worker.queue.quarantine.
local function put_back_dead(queue, job, execution)
  if not put_back(queue, job, execution) then return false end
  local fields = redis.call('HMGET', job_key(job), DEATHS, STREAMED)
  if tokens_in(events_key(job)) <= as_count(fields[2]) then
    redis.call('HSET', job_key(job), DEATHS, (fields[1] or '') .. execution .. ' ')
  end
  return true
end

-- Put an open batch behind the others of a queue, also where the clock has gone back.
--
-- existing   'NX' leaves one that is there where it is, 'CH' moves it
local function put_behind(queue, run, existing)
  local last = redis.call('ZRANGE', open_key(queue), -1, -1, 'WITHSCORES')[2] or 0
  redis.call('ZADD', open_key(queue), existing, number(math.max(now(), last + 0.000001)), run)
end

-- Drop the rows of a batch that wait in these queues, with spaces between them.
local function drop_waiting(run, queues)
  for queue in string.gmatch(queues or '', '%S+') do
    redis.call('DEL', batch_waiting_key(run, queue))
  end
end

local function batch_parts(run)
  return {batch_key(run), batch_results_key(run)}
end

-- Start the time after which a batch without rows left expires.
local function let_expire(run)
  local keep = redis.call('HGET', batch_key(run), 'keep_seconds') or KEEP_SECONDS
  for _, part in ipairs(batch_parts(run)) do redis.call('EXPIRE', part, keep) end
  redis.call('ZREM', BATCHES_KEY, run)
end

local function end_batch(run, state)
  local time = now()
  redis.call('HSET', batch_key(run), 'state', state, 'ended_at', number(time))
  redis.call('ZADD', BATCHES_ENDED_KEY, number(time), run)
  redis.call('ZREMRANGEBYSCORE', BATCHES_ENDED_KEY, '-inf', number(time - KEEP_SECONDS))
  redis.call('EXPIRE', BATCHES_ENDED_KEY, KEEP_SECONDS)
  let_expire(run)
end

-- Write the result of a batch's row once, and end the batch with its last one.
--
-- counts   what to add to fields of the batch: 'name=number name=number ...'
local function settle_row(queue, run, row, line, counts)
  local key, running = batch_key(run), batch_running_key(run, queue)
  if redis.call('HEXISTS', running, row) == 0 then return end
  redis.call('HSET', batch_results_key(run), row, line)
  for name, count in string.gmatch(counts, '(%S+)=(%d+)') do
    redis.call('HINCRBY', key, name, count)
  end
  redis.call('HDEL', running, row)
  if redis.call('HINCRBY', key, 'left', -1) > 0 then return end
  local state = redis.call('HGET', key, 'state') == 'cancelling' and 'cancelled'
    or redis.call('HEXISTS', key, 'failed:expired') == 1 and 'expired' or 'done'
  end_batch(run, state)
end

-- Look for rows that have waited longer than the window of their batch, once its first row has.
--
-- window   seconds, the longest of its rows; 'inf' if one of them has none
local function expire_after(time, window, run)
  if (window or 'inf') ~= 'inf' then
    redis.call('ZADD', EXPIRING_KEY, 'NX', number(time + window), 'batch:' .. run)
  end
end

-- Settle a running row that has no result.
--
-- custom_id   and message: for JSON; the first as JSON, the second without quotes
local function fail_row(queue, run, row, digest, custom_id, code, message)
  local line = '{"id": "batch_req_' .. digest .. '", "custom_id": ' .. custom_id
    .. ', "response": null, "error": {"code": "' .. code .. '", "message": "' .. message .. '"}}\n'
  settle_row(queue, run, row, line, 'failed:' .. code .. '=1')
end

-- The same with the first row that waits.
local function fail_first(queue, run, entry, row, ...)
  redis.call('HSET', batch_running_key(run, queue), row, entry)
  redis.call('LPOP', batch_waiting_key(run, queue))
  if redis.call('LLEN', batch_waiting_key(run, queue)) == 0 then redis.call('ZREM', open_key(queue), run) end
  fail_row(queue, run, row, ...)
end
