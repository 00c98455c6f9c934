-- Put jobs that this worker will not finish back at the front of their queues.
--
-- ARGV  for each: queue, job, execution. The last job of the list ends up first in its queue.
--
-- Returns for each: 1 if it was put back, 0 if its lease was gone.

local replies = {}
for i = 1, #ARGV, 3 do
  replies[#replies + 1] = give_back(unpack(ARGV, i, i + 2)) and 1 or 0
end
return replies
