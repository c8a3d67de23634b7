-- Removes jobs whose runs have ended, counts them, and adds failed ones to the dead letters.
-- KEYS: meta priority delayed processing lease run dlq processed failed
-- ARGV: format, then per job: id run result at. result: completed, failed or other
-- An entry of a later run stays.
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
local processed, failed = 0, 0
for from = 2, #ARGV, 2000 do
  local last = math.min(from + 1999, #ARGV)
  local all, ended = {}, {}
  for i = from, last, 4 do all[#all + 1] = ARGV[i] end
  local known = redis.call('HMGET', KEYS[6], unpack(all))
  for i = from, last, 4 do
    local id, run, result = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 2]
    local current = known[(i - from) / 4 + 1]
    if current and tonumber(current) <= run then ended[#ended + 1] = id end
    if result == 'completed' then
      processed = processed + 1
    elseif result == 'failed' then
      failed = failed + 1
      redis.call('ZADD', KEYS[7], ARGV[i + 3], id)
    end
  end
  if #ended > 0 then
    redis.call('HDEL', KEYS[4], unpack(ended))
    redis.call('ZREM', KEYS[5], unpack(ended))
    redis.call('HDEL', KEYS[6], unpack(ended))
  end
end
if processed > 0 then redis.call('INCRBY', KEYS[8], processed) end
if failed > 0 then redis.call('INCRBY', KEYS[9], failed) end
return processed + failed
