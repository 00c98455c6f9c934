-- Count prompts of an API key in its minute.
--
-- ARGV[1]    key
-- ARGV[2]    how many to count
-- ARGV[3]    the most
-- ARGV[4]    seconds of the minute
--
-- Returns 0 if they fit. Else none is counted, and it returns the seconds until the minute ends.

local key = rate_key(ARGV[1])
local count = tonumber(redis.call('GET', key) or 0) + ARGV[2]
if count > tonumber(ARGV[3]) then return math.max(1, redis.call('TTL', key)) end
redis.call('SET', key, 0, 'EX', ARGV[4], 'NX')
redis.call('INCRBY', key, ARGV[2])
return 0
