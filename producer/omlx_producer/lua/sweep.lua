-- Put jobs with expired leases back at the front of their queue, and count a death of a worker for
-- each, although it may only have been away for that long.
--
-- Leases end by the server's clock. If it goes back, those of the living are renewed, and those of
-- dead workers are moved back with it.
--
-- ARGV[1]    queue
-- ARGV[2]    how many entries of the registry to pass over: earlier calls have left them
-- ARGV[3]    how many to look at
-- ARGV[4]    grace in seconds, see `extend`
-- ARGV[5]    prefix of this project's execution ids; a stock worker's entries are left to RQ
--
-- Returns {ids of the returned jobs, number of entries that it leaves, number that it looked at}.

local queue, prefix = ARGV[1], ARGV[5]
local returned, ours, left = {}, {}, 0
local time = now()

local function renewed_at(entry)
  local job, execution = string.match(entry, '^([^:]*):(.*)$')
  if not job then return 0 end
  local key = execution_key(job, execution)
  return tonumber(redis.call('HGET', key, 'last_heartbeat') or '') or 0, key
end

-- Move the leases that last longest back by as much as the clock, if they were renewed after now.
local function move_back()
  local longest = redis.call('ZREVRANGE', started_key(queue), 0, ARGV[3] - 1)
  local gone_back = 0
  for _, entry in ipairs(longest) do gone_back = math.max(gone_back, renewed_at(entry) - time) end
  -- Leases that were renewed in one call begin a little later each.
  if gone_back < 1 then return end
  for _, entry in ipairs(longest) do
    local renewed, key = renewed_at(entry)
    if renewed > time then
      redis.call('ZINCRBY', started_key(queue), number(-gone_back), entry)
      redis.call('HSET', key, 'last_heartbeat', number(renewed - gone_back))
    end
  end
end

move_back()
-- The last renewed first, and `renew` is in the order of claims.
local expired = redis.call('ZREVRANGEBYSCORE', started_key(queue), number(time + ARGV[4]), '-inf',
  'LIMIT', ARGV[2], ARGV[3])
for _, entry in ipairs(expired) do
  local job, execution = string.match(entry, '^([^:]*):(.*)$')
  if execution and string.sub(execution, 1, #prefix) == prefix then
    ours[#ours + 1] = {job, execution}
  else
    left = left + 1
  end
end
-- Execution ids grow with time: the last claimed goes first, and the oldest ends up in front.
table.sort(ours, function(a, b) return a[2] > b[2] end)
for _, entry in ipairs(ours) do
  local job = entry[1]
  if put_back_dead(queue, job, entry[2]) then returned[#returned + 1] = job end
end
return {returned, left, #expired}
