-- What waits in lists of ids of jobs, or of rows of a batch.
--
-- ARGV  lists
--
-- Returns for each: how many wait in it, when the first of them was queued or uploaded, and the
-- version of its payload.

local answer = {}
for i, key in ipairs(ARGV) do
  local head = redis.call('LINDEX', key, 0) or ''
  local date, run = string.match(head, '^%S+ %S+ (%S+)'), string.match(key, '^omlx:batch:(%x+):')
  local hash = run and batch_key(run) or job_key(head)
  date = date or redis.call('HGET', hash, 'enqueued_at')
  answer[i] = {redis.call('LLEN', key), date or '', as_count(redis.call('HGET', hash, WIRE_FIELD))}
end
return answer
