-- Moves jobs of one lane into the delayed set, from wherever they are.
-- KEYS: meta priority delayed processing lease run dlq lane
-- ARGV: format mode, then per job: due id
-- mode: see put.lua. Returns how many were new.
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
local new = 0
for i = 3, #ARGV, 2 do
  local id = ARGV[i + 1]
  if ARGV[2] == 'now' or redis.call('HEXISTS', KEYS[4], id) == 0 then
    new = new + redis.call('ZADD', KEYS[3], ARGV[i], id)
    redis.call('ZREM', KEYS[2], id)
    redis.call('ZREM', KEYS[8], id)
    redis.call('ZREM', KEYS[7], id)
    redis.call('HDEL', KEYS[4], id)
    redis.call('ZREM', KEYS[5], id)
    redis.call('HDEL', KEYS[6], id)
  end
end
return new
