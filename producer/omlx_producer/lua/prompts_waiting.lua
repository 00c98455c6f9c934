-- How many prompts of an API key wait: more than do, while there is room. Beyond, jobs that do not wait are
-- forgotten, until none of many at random is one.
--
-- ARGV[1]    owner
-- ARGV[2]    how many leave no room

local key, forgotten = prompts_key(ARGV[1]), 1
while forgotten > 0 and redis.call('SCARD', key) >= tonumber(ARGV[2]) do
  forgotten = 0
  for _, job in ipairs(redis.call('SRANDMEMBER', key, 1000)) do
    if status(job) ~= 'queued' then forgotten = forgotten + redis.call('SREM', key, job) end
  end
end
return redis.call('SCARD', key)
