-- The queues in which a job or a row of an open batch waits that a worker takes, paused or not.
--
-- KEYS     names of queues (names, not keys)
-- ARGV[1]  the latest version of payloads that the worker knows
--
-- Returns {names, a job or the run of a batch that is too new, or ''}. Of each queue it looks at as
-- many jobs as claim.lua does.

local known, newer = tonumber(ARGV[1]), ''

local function is_known(version, name)
  if as_count(version) <= known then return true end
  newer = name
  return false
end

local function holds_job(queue)
  for index = 0, 999 do
    local job = redis.call('LINDEX', queue_key(queue), index)
    if not job then return false end
    if is_known(redis.call('HGET', job_key(job), WIRE_FIELD), job) then return true end
  end
end

local function holds_row(queue)
  for _, run in ipairs(redis.call('ZRANGE', open_key(queue), 0, -1)) do
    if redis.call('EXISTS', batch_waiting_key(run, queue)) == 1
      and is_known(redis.call('HGET', batch_key(run), WIRE_FIELD), run) then return true end
  end
end

local found = {}
for _, queue in ipairs(KEYS) do
  if holds_job(queue) or holds_row(queue) then found[#found + 1] = queue end
end
return {found, newer}
