-- Prepares the keys for the current format. Data of an older format, and values of another type, are deleted.
-- KEYS: meta priority delayed processing lease run dlq lane...
-- ARGV: format now
-- Returns the format that was found (0: none, -1: values of another type), and 1 if the queue must be filled.
local kinds = { 'hash', 'zset', 'zset', 'hash', 'zset', 'hash', 'zset' }
local found, foreign = 0, false
for i = 1, #KEYS do
  local kind = redis.call('TYPE', KEYS[i]).ok
  if kind ~= 'none' and kind ~= (kinds[i] or 'zset') then
    redis.call('DEL', KEYS[i])
    foreign = true
  end
end
local format = redis.call('HGET', KEYS[1], 'format')
if format then found = tonumber(format) or 0 end
if found > tonumber(ARGV[1]) then return { found, 0 } end
if found == tonumber(ARGV[1]) then return { foreign and -1 or found, foreign and 1 or 0 } end
-- Data that was restored from a backup may also lack its format.
for i = 2, #KEYS do redis.call('DEL', KEYS[i]) end
redis.call('HSET', KEYS[1], 'format', ARGV[1], 'filledAt', ARGV[2])
return { foreign and -1 or found, 1 }
