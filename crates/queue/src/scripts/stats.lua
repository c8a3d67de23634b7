-- Counts the entries of all sets at one moment.
-- KEYS: meta priority delayed processing lease run dlq lane...
-- ARGV: format
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
local counts = {
  redis.call('ZCARD', KEYS[2]),
  redis.call('ZCARD', KEYS[3]),
  redis.call('HLEN', KEYS[4]),
  redis.call('ZCARD', KEYS[7]),
}
for i = 8, #KEYS do counts[#counts + 1] = redis.call('ZCARD', KEYS[i]) end
return counts
