-- Removes jobs from everything but the dead letters.
-- KEYS: meta priority delayed processing lease run dlq, and a lane if it is known
-- ARGV: format, then ids
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
for i = 2, #ARGV do
  local id = ARGV[i]
  redis.call('ZREM', KEYS[2], id)
  redis.call('ZREM', KEYS[3], id)
  redis.call('HDEL', KEYS[4], id)
  redis.call('ZREM', KEYS[5], id)
  redis.call('HDEL', KEYS[6], id)
  if KEYS[8] then redis.call('ZREM', KEYS[8], id) end
end
return #ARGV - 1
