-- Upload the rows of a run that the batch does not know.
--
-- ARGV[1]    run
-- ARGV[2]    queues of all its rows
-- ARGV[3]    the window of the batch, see `expire_after`
-- ARGV[4]    the latest version of their payloads
-- ARGV[5..]  for each row: queue, name, entry
--
-- Returns how many rows were added.

local run, key, time, added = ARGV[1], batch_key(ARGV[1]), number(now()), 0
if redis.call('HEXISTS', key, 'cancelled_by') == 1 then return 0 end
for i = 5, #ARGV, 3 do
  local queue, name, entry = unpack(ARGV, i, i + 2)
  if redis.call('SADD', batch_rows_key(run), name) == 1 then
    redis.call('RPUSH', batch_waiting_key(run, queue), entry)
    put_behind(queue, run, 'NX')
    added = added + 1
  end
end
if added == 0 then return 0 end
redis.call('HINCRBY', key, 'left', added)
redis.call('HINCRBY', key, 'rows', added)
redis.call('HSET', key, 'queues', ARGV[2], 'window', ARGV[3],
  WIRE_FIELD, math.max(ARGV[4], as_count(redis.call('HGET', key, WIRE_FIELD))))
expire_after(time, ARGV[3], run)
redis.call('ZADD', BATCHES_KEY, 'NX', time, run)
for _, part in ipairs(batch_parts(run)) do redis.call('PERSIST', part) end
return added
