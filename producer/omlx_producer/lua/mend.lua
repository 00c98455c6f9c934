-- Rows of batches whose jobs were deleted wait again; those whose jobs other tools have ended fail. Of
-- many rows that run it looks at some, at random.
--
-- ARGV[1]    queue
-- ARGV[2]    how many batches to pass over
-- ARGV[3]    how many batches and rows to look at, about
--
-- Returns how many batches the next call is to pass over; nil after the last one.

local queue, first, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])

local function settle_cancelled(run, row)
  local entry = redis.call('HGET', batch_running_key(run, queue), row)
  local digest, custom_id = string.match(entry, '^%S+ (%x+) %S+ ([^\n]*)')
  fail_row(queue, run, row, digest, custom_id, 'cancelled', 'the job was cancelled')
end

local function wait_again(run, row)
  redis.call('LPUSH', batch_waiting_key(run, queue), redis.call('HGET', batch_running_key(run, queue), row))
  put_behind(queue, run, 'NX')
  redis.call('HDEL', batch_running_key(run, queue), row)
end

local function mend_row(run, row, cancelling)
  local state = status(row_job(run, row))
  if ENDED[state] or (state == 'deleted' and cancelling) then
    settle_cancelled(run, row)
  elseif state == 'deleted' then
    wait_again(run, row)
  end
end

-- Returns how many rows it has looked at.
local function mend_batch(run)
  local cancelling = redis.call('HGET', batch_key(run), 'state') == 'cancelling'
  local rows = redis.call('HRANDFIELD', batch_running_key(run, queue), most)
  for _, row in ipairs(rows) do mend_row(run, row, cancelling) end
  return #rows
end

local looked = 0
local runs = redis.call('ZRANGE', BATCHES_KEY, first, first + most - 1)
for i, run in ipairs(runs) do
  looked = looked + 1 + mend_batch(run)
  if looked >= most then return first + i end
end
return false
