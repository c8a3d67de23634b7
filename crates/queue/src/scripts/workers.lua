-- Replaces the registry of workers.
-- KEYS: workers
-- ARGV: per worker: id description
redis.call('DEL', KEYS[1])
for i = 1, #ARGV, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
return #ARGV / 2
