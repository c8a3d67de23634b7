-- Removes jobs whose runs have ended, counts them, and adds failed ones to the dead letters.
-- KEYS: meta priority delayed processing lease run dlq processed failed
-- ARGV: format, then per job: id run result at. result: completed, failed or other
-- An entry of a later run stays.
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue is not filled')
end
local processed, failed = 0, 0
for i = 2, #ARGV, 4 do
  local id, run = ARGV[i], ARGV[i + 1]
  local known = redis.call('HGET', KEYS[6], id)
  if known and tonumber(known) <= tonumber(run) then
    redis.call('HDEL', KEYS[4], id)
    redis.call('ZREM', KEYS[5], id)
    redis.call('HDEL', KEYS[6], id)
  end
  if ARGV[i + 2] == 'completed' then
    processed = processed + 1
  elseif ARGV[i + 2] == 'failed' then
    failed = failed + 1
    redis.call('ZADD', KEYS[7], ARGV[i + 3], id)
  end
end
if processed > 0 then redis.call('INCRBY', KEYS[8], processed) end
if failed > 0 then redis.call('INCRBY', KEYS[9], failed) end
return processed + failed
