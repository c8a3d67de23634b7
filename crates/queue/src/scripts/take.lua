-- Takes the next jobs of some lanes for one owner: removes them from the ready sets and records them as in flight.
-- KEYS: meta priority delayed processing lease run dlq lane...
-- ARGV: format owner lease_until limit first_queue, then per lane: queue bias
-- Takes jobs of one queue in the order of score + bias, then id, and takes from the queues in turn. Returns: lane number, id, score, ...
if redis.call('HGET', KEYS[1], 'format') ~= ARGV[1] then
  return redis.error_reply('NOTFILLED the queue must be filled from the database')
end
local limit = tonumber(ARGV[4])
local by_queue, order = {}, {}
local chunk = math.max(16, math.ceil(2 * limit / (#KEYS - 7)))

local function head(lane)
  if lane.at > #lane.jobs then
    if lane.read > 0 and #lane.jobs < 2 * chunk then return nil end
    lane.jobs = redis.call('ZRANGE', lane.key, lane.read, lane.read + chunk - 1, 'WITHSCORES')
    lane.read = lane.read + #lane.jobs / 2
    lane.at = 1
    if #lane.jobs == 0 then return nil end
  end
  return lane.jobs[lane.at], tonumber(lane.jobs[lane.at + 1]) + lane.bias
end

for i = 8, #KEYS do
  local number = i - 7
  local queue = ARGV[4 + 2 * number]
  if not by_queue[queue] then
    by_queue[queue] = {}
    order[#order + 1] = queue
  end
  local lane = { key = KEYS[i], number = number, bias = tonumber(ARGV[5 + 2 * number]), jobs = {}, at = 1, read = 0, taken = {} }
  table.insert(by_queue[queue], lane)
end

local answer, ids, turn = {}, {}, #order > 0 and tonumber(ARGV[5]) % #order or 0
while #ids < limit and #order > 0 do
  turn = turn % #order + 1
  local best, best_id, best_score
  for _, lane in ipairs(by_queue[order[turn]]) do
    local id, score = head(lane)
    if id and (not best or score < best_score or (score == best_score and id < best_id)) then
      best, best_id, best_score = lane, id, score
    end
  end
  if best then
    ids[#ids + 1] = best_id
    best.taken[#best.taken + 1] = best_id
    answer[#answer + 1] = best.number
    answer[#answer + 1] = best_id
    answer[#answer + 1] = best.jobs[best.at + 1]
    best.at = best.at + 2
  else
    table.remove(order, turn)
    turn = turn - 1
  end
end

local function each_part(list, width, call)
  for from = 1, #list, 1000 * width do
    call(unpack(list, from, math.min(from + 1000 * width - 1, #list)))
  end
end

for _, lanes in pairs(by_queue) do
  for _, lane in ipairs(lanes) do
    each_part(lane.taken, 1, function(...) redis.call('ZREM', lane.key, ...) end)
  end
end
local owners, leases, runs = {}, {}, {}
for _, id in ipairs(ids) do
  owners[#owners + 1], owners[#owners + 2] = id, ARGV[2]
  leases[#leases + 1], leases[#leases + 2] = ARGV[3], id
  runs[#runs + 1], runs[#runs + 2] = id, '0'
end
each_part(ids, 1, function(...) redis.call('ZREM', KEYS[2], ...) end)
each_part(owners, 2, function(...) redis.call('HSET', KEYS[4], ...) end)
each_part(leases, 2, function(...) redis.call('ZADD', KEYS[5], ...) end)
each_part(runs, 2, function(...) redis.call('HSET', KEYS[6], ...) end)
return answer
