-- End a batch that is not uploaded, for its input is wrong.
--
-- ARGV[1]    run
-- ARGV[2]    when it was made
-- ARGV[3]    what is wrong with it, as JSON

local key = batch_key(ARGV[1])
local created, state = unpack(redis.call('HMGET', key, 'created_at', 'state'))
if created ~= ARGV[2] or state ~= 'uploading' then return end
redis.call('HSET', key, 'state', 'failed', 'errors', ARGV[3], 'ended_at', number(now()))
redis.call('EXPIRE', key, KEEP_SECONDS)
