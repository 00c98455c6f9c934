-- Start jobs that have waited longer than their completion windows, by the server's clock, whatever
-- model they are for. The caller fails them. A job whose lease has passed is one of a dead worker, or
-- of an earlier call; it is started anew. Rows of batches that have no job fail here.
--
-- ARGV[1]    worker name
-- ARGV[2]    lease in seconds
-- ARGV[3]    grace in seconds, see `extend`
-- ARGV[4]    id of this call, the prefix of execution ids
-- ARGV[5]    how many jobs or rows to look at, about
-- ARGV[6]    why rows fail
--
-- Returns the jobs, each as {job, execution, queue, tokens in its stream, run, number, digest and
-- custom_id of a batch's row, or ''}, how many rows have failed, and whether more is due.

local MOST = tonumber(ARGV[5])
local AGAIN = 10  -- seconds until the next look at what runs
local worker, lease, grace = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local time, date = now()
local started, failed = {}, 0

local function start(queue, job)
  local execution = ARGV[4] .. string.format('%04x', #started)
  start_execution(queue, job, execution, #started, worker, time, date, lease, grace)
  redis.call('LREM', queue_key(queue), 1, job)
  started[#started + 1] = {job, execution, queue, tokens_in(events_key(job)),
    redis.call('HGET', job_key(job), ROW) or ''}
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

-- The rows of a batch come in the order of their times, but for those that were put back.
local function fail_waiting(queue, run, late)
  while failed < MOST do
    local entry = redis.call('LINDEX', batch_waiting_key(run, queue), 0) or ''
    local row, digest, created, custom_id = string.match(entry, '^(%S+) (%x+) (%S+) ([^\n]+)')
    if not row or created > late then return end
    fail_first(queue, run, entry, row, digest, custom_id, 'expired', ARGV[6])
    failed = failed + 1
  end
end

-- Look at the jobs of rows that are due, as at other jobs.
local function look_at_running(queue, run, late)
  local rows = redis.call('HRANDFIELD', batch_running_key(run, queue), MOST, 'WITHVALUES')
  for i = 1, #rows, 2 do
    if (string.match(rows[i + 1], '^%S+ %x+ (%S+)') or late) < late then
      redis.call('ZADD', EXPIRING_KEY, 'NX', number(time), row_job(run, rows[i]))
    end
  end
end

local function expire_rows(run, member)
  local window, queues, left = unpack(
    redis.call('HMGET', batch_key(run), 'window', 'queues', 'left'))
  if (window or 'inf') == 'inf' or tonumber(left or 0) <= 0 then
    return redis.call('ZREM', EXPIRING_KEY, member)
  end
  local _, late = now(time - window)
  for queue in string.gmatch(queues, '%S+') do
    fail_waiting(queue, run, late)
    look_at_running(queue, run, late)
  end
  if failed < MOST then look_after(AGAIN, member) end
end

local due = redis.call('ZRANGEBYSCORE', EXPIRING_KEY, '-inf', number(time), 'LIMIT', 0, MOST)
for _, member in ipairs(due) do
  local run = string.match(member, '^batch:(%x+)$')
  if run then expire_rows(run, member) else expire(member) end
end
return {started, failed, (#due == MOST or failed == MOST) and 1 or 0}
