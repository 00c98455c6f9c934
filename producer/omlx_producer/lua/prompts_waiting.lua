-- How many prompts of an API key wait, at most. The set also holds jobs that do not wait any more: they are
-- removed, a random sample at a time, only when the set is full.
--
-- ARGV[1]    owner
-- ARGV[2]    how many may wait

local key, forgotten = prompts_key(ARGV[1]), 1
while forgotten > 0 and redis.call('SCARD', key) >= tonumber(ARGV[2]) do
  forgotten = 0
  for _, job in ipairs(redis.call('SRANDMEMBER', key, 1000)) do
    if status(job) ~= 'queued' then forgotten = forgotten + redis.call('SREM', key, job) end
  end
end
return redis.call('SCARD', key)
