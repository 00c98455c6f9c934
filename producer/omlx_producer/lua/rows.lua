-- The rows of a batch that have no result.
--
-- ARGV[1]    run
-- ARGV[2..]  queues of its rows
--
-- Returns a name and a digest for each.

local run, rows = ARGV[1], {}

local function add(entry)
  local name, digest = string.match(entry, '^(%S+) (%x+)')
  if name then
    rows[#rows + 1] = name
    rows[#rows + 1] = digest
  end
end

for i = 2, #ARGV do
  for _, entry in ipairs(redis.call('LRANGE', batch_waiting_key(run, ARGV[i]), 0, -1)) do add(entry) end
  for _, entry in ipairs(redis.call('HVALS', batch_running_key(run, ARGV[i]))) do add(entry) end
end
return rows
