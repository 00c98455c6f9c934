-- Put jobs with expired leases back at the front of their queue, and count a death of a worker for
-- each, although it may only have been away for that long.
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

-- The last renewed first, and `renew` is in the order of claims.
local expired = redis.call('ZREVRANGEBYSCORE', started_key(queue), number(now() + ARGV[4]), '-inf',
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
