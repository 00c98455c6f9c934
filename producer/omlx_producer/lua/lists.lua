-- What waits in lists of ids of jobs, or of rows of a batch.
--
-- ARGV  lists
--
-- Returns for each: how many wait in it, and when the first of them was queued or uploaded.

local answer = {}
for i, key in ipairs(ARGV) do
  local head = redis.call('LINDEX', key, 0) or ''
  local date = string.match(head, '^%S+ %S+ (%S+)')
  if head ~= '' and not date then date = redis.call('HGET', job_key(head), 'enqueued_at') end
  answer[i] = {redis.call('LLEN', key), date or ''}
end
return answer
