-- Open a batch to workers, with its upload, or end it without its rows, for its input is wrong.
--
-- ARGV[1]    run
-- ARGV[2]    when it was made: another upload with this id has another time
-- ARGV[3]    how many rows it has, those with results among them
-- ARGV[4]    what is wrong with its input, as JSON, or ''
-- ARGV[5..]  queues of its rows
--
-- Returns the state of the batch; false if it has expired, or was replaced.

local run, key = ARGV[1], batch_key(ARGV[1])
local created, state, queues, window = unpack(
  redis.call('HMGET', key, 'created_at', 'state', 'queues', 'window'))
if created ~= ARGV[2] then return false end
if state ~= 'uploading' then return state end
local time, waiting = number(now()), 0
if ARGV[4] ~= '' then
  drop_waiting(run, queues)
  redis.call('HDEL', key, 'rows', 'queues')
  redis.call('HSET', key, 'state', 'failed', 'errors', ARGV[4], 'ended_at', time)
  redis.call('EXPIRE', key, KEEP_SECONDS)
  return 'failed'
end
for i = 5, #ARGV do waiting = waiting + redis.call('LLEN', batch_waiting_key(run, ARGV[i])) end
redis.call('HSET', key, 'rows', ARGV[3], 'left', waiting, 'keep_seconds', KEEP_SECONDS)
if waiting == 0 then
  end_batch(run, 'done')
  return 'done'
end
redis.call('HSET', key, 'state', 'open')
redis.call('PERSIST', key)
redis.call('PERSIST', batch_results_key(run))
redis.call('ZADD', BATCHES_KEY, time, run)
expire_after(tonumber(created), window, run)
for i = 5, #ARGV do
  redis.call('PERSIST', batch_waiting_key(run, ARGV[i]))
  put_behind(ARGV[i], run, 'CH')
end
return 'open'
