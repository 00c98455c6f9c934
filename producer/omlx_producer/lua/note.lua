-- Note fields in the hash of a batch, unless it has expired or was deleted.
--
-- ARGV[1]    run
-- ARGV[2..]  fields and their values

local key = batch_key(ARGV[1])
if redis.call('HEXISTS', key, 'created_at') == 1 then redis.call('HSET', key, unpack(ARGV, 2)) end
