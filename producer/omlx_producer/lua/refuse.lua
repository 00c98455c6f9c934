-- End a batch that is not uploaded, for its input is wrong.
--
-- ARGV[1]    run
-- ARGV[2]    what is wrong with it, as JSON

local key = batch_key(ARGV[1])
if redis.call('HGET', key, 'state') ~= 'uploading' then return end
redis.call('HSET', key, 'state', 'failed', 'errors', ARGV[2], 'ended_at', number(now()))
redis.call('EXPIRE', key, KEEP_SECONDS)
