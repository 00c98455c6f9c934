-- Write one event of each of many jobs to its stream and its channel, for lease holders only.
--
-- ARGV[1]    seconds that a stream lives after its last event
-- ARGV[2]    prefix of event streams
-- ARGV[3]    prefix of token channels
-- ARGV[4..]  for each job: queue, job, execution, id of the entry before, entry id, event; an empty
--            event only asks whether the lease is still held
--
-- Returns {job, reason, job, reason, ...} of those that were refused, where the reason is the job's
-- status when its lease is gone, 'written' when its stream is already further, or 'behind' when
-- the server has lost the end of it; and of those that were written but are to be stopped, with
-- the reason 'stop'.

local ttl, events, tokens = ARGV[1], ARGV[2], ARGV[3]
local told = {}

local function tell(job, reason)
  told[#told + 1] = job
  told[#told + 1] = reason
end

-- A server that was killed may come back without the last entries that it had acknowledged.
local function is_behind(job, before)
  if before == '0-0' then return false end
  local at = string.match(last_id(events .. job) or '0-0', '^%d+')
  return tonumber(at) < tonumber(string.match(before, '^%d+'))
end

for i = 4, #ARGV, 6 do
  local queue, job, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local before, id, event = ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  local reason = false
  if not holds(queue, job, execution) then
    reason = status(job)
  elseif event ~= '' and is_behind(job, before) then
    reason = 'behind'
  elseif event ~= '' then
    local reply = redis.pcall('XADD', events .. job, id, 'event', event)
    if type(reply) == 'table' and reply.err then
      if not string.find(reply.err, 'equal or smaller', 1, true) then return reply end
      -- The holder of a lease is its only writer: its own id at the top is a call that was
      -- made twice because the first answer was lost.
      if last_id(events .. job) ~= id then reason = 'written' end
    else
      redis.call('PUBLISH', tokens .. job, event)
      redis.call('EXPIRE', events .. job, ttl)
    end
  end
  if not reason and redis.call('HEXISTS', job_key(job), STOP) == 1 then reason = 'stop' end
  if reason then tell(job, reason) end
end
return told
