-- How many prompts of an API key wait, about. It looks at some of the jobs, at random, and forgets those
-- that do not wait: each request adds fewer.
--
-- ARGV[1]    owner

local key = prompts_key(ARGV[1])
for _, job in ipairs(redis.call('SRANDMEMBER', key, 20)) do
  if status(job) ~= 'queued' then redis.call('SREM', key, job) end
end
return redis.call('SCARD', key)
