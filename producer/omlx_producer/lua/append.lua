-- Publish events of many jobs, each on its job's stream and channel, if the lease holds.
--
-- ARGV[1]    seconds until a stream expires after its last event
-- ARGV[2..]  for each event: queue, job, execution, tokens before it, entry id, event; an empty event
--            only checks the lease
--
-- Returns {job, reason, job, reason, ...} for refused events: the job's status if the lease is gone,
-- 'written' if the stream has other entries, the number of tokens in it if the server has lost the
-- last ones. 'stop' means that the event was written and the job is to be stopped.

local ttl = ARGV[1]
local told = {}

local function tell(job, reason)
  told[#told + 1] = job
  told[#told + 1] = reason
end

local function append(queue, job, execution, before, id, event)
  local reason = false
  if not holds(queue, job, execution) then
    reason = refuse(job, execution)
  elseif event ~= '' and is_behind(events_key(job), before) then
    reason = tokens_in(events_key(job))
  elseif event ~= '' then
    local reply = redis.pcall('XADD', events_key(job), id, 'event', event)
    if type(reply) == 'table' and reply.err then
      -- Redis raises any other error here.
      if not string.find(reply.err, 'equal or smaller', 1, true) then
        redis.call('XADD', events_key(job), id, 'event', event)
      end
      if not is_written(job, id, event) then reason = 'written' end
    else
      redis.call('PUBLISH', tokens_channel(job), event)
      redis.call('EXPIRE', events_key(job), ttl)
    end
  end
  if not reason and redis.call('HEXISTS', job_key(job), STOP_FIELD) == 1 then reason = 'stop' end
  if reason then tell(job, reason) end
end

for i = 2, #ARGV, 6 do append(unpack(ARGV, i, i + 5)) end
return told
