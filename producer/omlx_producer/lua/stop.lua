-- Mark a running job as to be stopped. A dead worker gets no command, but the next one reads the mark.
--
-- ARGV[1]    job
--
-- Returns whether it runs.

if redis.call('HGET', job_key(ARGV[1]), 'status') ~= 'started' then return 0 end
redis.call('HSET', job_key(ARGV[1]), STOP_FIELD, 1)
return 1
