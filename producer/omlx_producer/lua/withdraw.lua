-- Take out the rows of a run that have no job, or one that waits.
--
-- ARGV[1]    run
-- ARGV[2..]  queues of its rows
--
-- Returns the names of the rows.

local run, names = ARGV[1], {}

local function withdraw_waiting(queue)
  for _, entry in ipairs(redis.call('LRANGE', batch_waiting_key(run, queue), 0, -1)) do
    names[#names + 1] = string.match(entry, '^%S+')
  end
  redis.call('DEL', batch_waiting_key(run, queue))
  redis.call('ZREM', open_key(queue), run)
end

local function withdraw_queued(queue)
  for _, name in ipairs(redis.call('HKEYS', batch_running_key(run, queue))) do
    local job = row_job(run, name)
    local state = status(job)
    if state == 'deleted' or state == 'queued' then
      redis.call('LREM', queue_key(queue), 0, job)
      redis.call('DEL', job_key(job))
      redis.call('HDEL', batch_running_key(run, queue), name)
      names[#names + 1] = name
    end
  end
end

for i = 2, #ARGV do
  withdraw_waiting(ARGV[i])
  withdraw_queued(ARGV[i])
end
for _, name in ipairs(names) do redis.call('SREM', batch_rows_key(run), name) end
if #names > 0 then
  redis.call('HINCRBY', batch_key(run), 'rows', -#names)
  if redis.call('HINCRBY', batch_key(run), 'left', -#names) <= 0 then let_expire(run) end
end
return names
