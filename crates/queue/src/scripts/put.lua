-- Moves jobs of one lane into the ready sets, from wherever they are.
-- KEYS: meta priority delayed processing lease run dlq lane
-- ARGV: format mode, then per job: score id
-- mode: "now" (the database made them ready, or the node that took them returns them), or "fill" (they are restored
-- from the database, and jobs in flight stay in flight). Returns how many were new.
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
local new = 0
for from = 3, #ARGV, 1000 do
  local entries, ids = {}, {}
  for i = from, math.min(from + 998, #ARGV - 1), 2 do
    if ARGV[2] == 'now' or redis.call('HEXISTS', KEYS[4], ARGV[i + 1]) == 0 then
      entries[#entries + 1], entries[#entries + 2] = ARGV[i], ARGV[i + 1]
      ids[#ids + 1] = ARGV[i + 1]
    end
  end
  if #ids > 0 then
    new = new + redis.call('ZADD', KEYS[8], unpack(entries))
    redis.call('ZADD', KEYS[2], unpack(entries))
    redis.call('ZREM', KEYS[3], unpack(ids))
    redis.call('ZREM', KEYS[7], unpack(ids))
    if ARGV[2] == 'now' then
      redis.call('HDEL', KEYS[4], unpack(ids))
      redis.call('ZREM', KEYS[5], unpack(ids))
      redis.call('HDEL', KEYS[6], unpack(ids))
    end
  end
end
return new
