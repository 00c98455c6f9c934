-- Precedes every script: RQ's key names, RQ's date format, leases, and the way back to a queue.
--
-- Scripts check first and remove last. Redis does not roll back a script that fails half way (out
-- of memory, read only). So a job leaves one place only after it was written to the next.

local function job_key(job) return 'rq:job:' .. job end
local function queue_key(queue) return 'rq:queue:' .. queue end
local function started_key(queue) return 'rq:wip:' .. queue end
local function executions_key(job) return 'rq:executions:' .. job end
local function execution_key(job, execution) return 'rq:execution:' .. job .. ':' .. execution end
local function reservation_key(job) return 'omlx:trial:' .. job end
local function member(job, execution) return job .. ':' .. execution end

-- This project's fields in RQ's job hash. RQ keeps unknown fields.
local CRASHES = 'omlx_crashes'  -- how many workers died while they held the job
local ALONE = 'omlx_alone'      -- '1': it is its worker's only job, or was when the worker died
local STOP = 'omlx_stop'        -- '1': it is to be stopped

-- The time: seconds since 1970, and RQ's format of it in job hashes.
local function now()
  local time = redis.call('TIME')
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
local function holds(queue, job, execution)
  return redis.call('ZSCORE', started_key(queue), member(job, execution)) ~= false
end

-- Why a lease is gone: the job's status, or 'deleted'.
local function status(job)
  local reply = redis.pcall('HGET', job_key(job), 'status')
  return type(reply) == 'string' and reply or 'deleted'
end

-- The id of a stream's last entry; nil without one.
local function last_id(stream)
  local last = redis.pcall('XREVRANGE', stream, '+', '-', 'COUNT', 1)
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

-- Run a command that writes to a key. A key of another type is deleted first: RQ would fail on it.
local function write(command, key, ...)
  local reply = redis.pcall(command, key, ...)
  if type(reply) ~= 'table' or not reply.err then return reply end
  if string.find(reply.err, 'WRONGTYPE', 1, true) then redis.call('DEL', key) end
  -- Redis raises any other error here.
  return redis.call(command, key, ...)
end

-- Write or renew the end of a lease. RQ's clean-up, which even `rq info` runs, fails started jobs
-- whose score has passed. So the score is `grace` seconds later, and sweep.lua subtracts them.
local function extend(queue, job, execution, time, lease, grace)
  local ttl = math.ceil(lease)
  redis.call('ZADD', started_key(queue), number(time + lease + grace), member(job, execution))
  write('ZADD', executions_key(job), number(time + ttl + 60), execution)
  redis.call('EXPIRE', executions_key(job), ttl + 60)
  -- It outlives the entry above: RQ raises if it finds the entry without the hash.
  redis.call('EXPIRE', execution_key(job, execution), ttl + 120)
end

local function drop_execution(queue, job, execution)
  redis.pcall('ZREM', executions_key(job), execution)
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
