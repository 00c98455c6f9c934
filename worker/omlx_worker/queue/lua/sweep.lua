-- Put jobs with expired leases back at the front of their queues, and count the deaths of their
-- workers, which may only have been away for as long. Rows of batches whose jobs were deleted wait
-- again; those whose jobs other tools have ended fail.
--
-- KEYS[1]    lock: while it exists, only its owner sweeps
-- ARGV[1]    milliseconds until the lock expires
-- ARGV[2]    grace in seconds, see `extend`
-- ARGV[3]    prefix of this project's execution ids; a stock worker's entries are left to RQ
-- ARGV[4]    prefix of event streams
-- ARGV[5..]  queues
--
-- Returns the ids of the returned jobs, nil if another worker has swept.

if not redis.call('SET', KEYS[1], '1', 'NX', 'PX', ARGV[1]) then return false end
local time = now()
local returned = {}

local function put_back_expired(queue)
  local expired = redis.call('ZRANGEBYSCORE', started_key(queue),
    '-inf', number(time + tonumber(ARGV[2])))
  local ours = {}
  for _, entry in ipairs(expired) do
    local job, execution = string.match(entry, '^([^:]*):(.*)$')
    if execution and string.sub(execution, 1, #ARGV[3]) == ARGV[3] then
      ours[#ours + 1] = {job, execution}
    end
  end
  -- Execution ids grow with time: the last claimed goes first, and the oldest ends up in front.
  table.sort(ours, function(a, b) return a[2] > b[2] end)
  for _, entry in ipairs(ours) do
    local job = entry[1]
    if attempt(put_back_dead, queue, job, entry[2], ARGV[4] .. job) then
      returned[#returned + 1] = job
    end
  end
end

for i = 5, #ARGV do attempt(put_back_expired, ARGV[i]) end

local ended = {failed = true, stopped = true, canceled = true, finished = true}
local MOST_ROWS = 100  -- that one call puts back or settles

local function settle_cancelled(queue, run, row)
  local entry = redis.call('HGET', running_key(run, queue), row)
  local digest, custom_id = string.match(entry, '^%S+ (%x+) %S+ ([^\n]*)')
  fail_row(queue, run, row, digest, custom_id, 'cancelled', 'the job was cancelled')
end

local function wait_again(queue, run, row)
  redis.call('LPUSH', waiting_key(run, queue), redis.call('HGET', running_key(run, queue), row))
  redis.call('ZADD', open_key(queue), 0, run)
  redis.call('HDEL', running_key(run, queue), row)
end

-- Returns whether the row was not where it should be.
local function mend(queue, run, row, cancelling)
  local job = row_job(run, row)
  local state = status(job)
  if state == 'queued' and not redis.call('LPOS', queue_key(queue), job) then
    return redis.call('LPUSH', queue_key(queue), job)
  end
  if ended[state] or (state == 'deleted' and cancelling) then
    settle_cancelled(queue, run, row)
  elseif state == 'deleted' then
    wait_again(queue, run, row)
  end
  return ended[state] or state == 'deleted'
end

local function mend_rows(queue, run)
  local cancelling = redis.call('HGET', batch_key(run), 'state') == 'cancelling'
  local mended = 0
  for _, row in ipairs(redis.call('HKEYS', running_key(run, queue))) do
    if attempt(mend, queue, run, row, cancelling) then mended = mended + 1 end
    if mended == MOST_ROWS then break end
  end
end

local function mend_batches()
  for _, run in ipairs(redis.call('ZRANGE', BATCHES, 0, -1)) do
    for i = 5, #ARGV do attempt(mend_rows, ARGV[i], run) end
  end
end

attempt(mend_batches)
return returned
