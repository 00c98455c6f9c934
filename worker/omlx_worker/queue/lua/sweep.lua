-- Put jobs with expired leases back at the front of their queues, and count a crash for each: their
-- worker has died, or was away for as long.
--
-- KEYS[1]    lock: while it exists, only its owner sweeps
-- ARGV[1]    milliseconds until the lock expires
-- ARGV[2]    grace in seconds, see `extend`
-- ARGV[3]    prefix of this project's execution ids; a stock worker's entries are left to RQ
-- ARGV[4..]  queues
--
-- Returns the ids of the returned jobs.

if not redis.call('SET', KEYS[1], '1', 'NX', 'PX', ARGV[1]) then return answer({}) end
local time = now()
local returned = {}
for i = 4, #ARGV do
  local queue = ARGV[i]
  local expired = try('ZRANGEBYSCORE', started_key(queue),
    '-inf', number(time + tonumber(ARGV[2]))) or {}
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
    if put_back_crashed(queue, job, entry[2]) then returned[#returned + 1] = job end
  end
end
return answer(returned)
