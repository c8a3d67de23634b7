-- Records the runs that the database has granted to jobs of one lane.
-- KEYS: meta priority delayed processing lease run dlq lane
-- ARGV: format lease_until source, then per job: id owner run
-- source: "taken" (take.lua has already removed them from the ready sets; removing them again would double the time), or "chosen"
-- (by the database).
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
for from = 4, #ARGV, 1500 do
  local ids, owners, leases, runs = {}, {}, {}, {}
  for i = from, math.min(from + 1499, #ARGV), 3 do
    local id = ARGV[i]
    ids[#ids + 1] = id
    owners[#owners + 1], owners[#owners + 2] = id, ARGV[i + 1]
    leases[#leases + 1], leases[#leases + 2] = ARGV[2], id
    runs[#runs + 1], runs[#runs + 2] = id, ARGV[i + 2]
  end
  if ARGV[3] ~= 'taken' then
    redis.call('ZREM', KEYS[2], unpack(ids))
    redis.call('ZREM', KEYS[8], unpack(ids))
  end
  redis.call('HSET', KEYS[4], unpack(owners))
  redis.call('ZADD', KEYS[5], unpack(leases))
  redis.call('HSET', KEYS[6], unpack(runs))
end
return (#ARGV - 3) / 3
