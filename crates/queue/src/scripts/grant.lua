-- Records the runs that the database has granted to jobs of one lane.
-- KEYS: meta priority delayed processing lease run dlq lane
-- ARGV: format lease_until, then per job: id owner run
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue is not filled')
end
for i = 3, #ARGV, 3 do
  local id = ARGV[i]
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[8], id)
  redis.call('HSET', KEYS[4], id, ARGV[i + 1])
  redis.call('ZADD', KEYS[5], ARGV[2], id)
  redis.call('HSET', KEYS[6], id, ARGV[i + 2])
end
return (#ARGV - 2) / 3
