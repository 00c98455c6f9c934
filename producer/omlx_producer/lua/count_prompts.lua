-- Count prompts of an API key in its minute.
--
-- ARGV[1]    key
-- ARGV[2]    how many to count
-- ARGV[3]    the most
-- ARGV[4]    seconds of the minute
--
-- Returns the seconds until the count begins anew if there would be more; else 0.

local key = rate_key(ARGV[1])
local count = tonumber(redis.call('GET', key) or 0) + ARGV[2]
if count > tonumber(ARGV[3]) then return math.max(1, redis.call('TTL', key)) end
redis.call('SET', key, 0, 'EX', ARGV[4], 'NX')
redis.call('INCRBY', key, ARGV[2])
return 0
