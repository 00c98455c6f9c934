-- Put jobs that this worker will not finish back at the front of their queues.
--
-- ARGV  for each: queue, job, execution; the last one ends up first in its queue
--
-- Returns for each: 1 if it was put back, 0 if its lease was gone.

local replies = {}
for i = 1, #ARGV, 3 do
  local queue, job, execution = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local returned = holds(queue, job, execution) and put_back(queue, job, execution)
  replies[#replies + 1] = returned and 1 or 0
end
return answer(replies)
