-- Put jobs that this worker will not finish back at the front of their queues.
--
-- ARGV  for each: queue, job, execution; the last one ends up first in its queue
--
-- Returns how many were still this worker's to give.

local returned = 0
for i = 1, #ARGV, 3 do
  if holds(ARGV[i], ARGV[i + 1], ARGV[i + 2]) and put_back(ARGV[i], ARGV[i + 1], ARGV[i + 2]) then
    returned = returned + 1
  end
end
return returned
