-- Writes rows, each guarded by its version. Versions are 16 hexadecimal digits and are compared as text: Lua's numbers
-- are doubles, in which two LSNs above 2^53 can be equal.
--
-- KEYS  row, version, row, version, ...
-- ARGV  form (json | hash), lifetime of a row, of its version, of a tombstone (milliseconds, 0 for ever), channel (empty:
--       none), then for each row: version, op (u | d), what the version key must still hold (empty: anything older),
--       the sets that the row belongs to (one on each line), value
-- The version key holds the version; behind it a `d` when the row is deleted, or a line for each set that the row is
-- in. So a row leaves its old sets in the call that writes it; in a cluster they share its slot.
-- Returns the places of the rows whose version key had changed in between; they were not written.

local form, row_life, version_life, tombstone_life, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local function remember(key, value, life)
  if life == '0' then
    redis.call('SET', key, value)
  else
    redis.call('SET', key, value, 'PX', life)
  end
end

local function write(key, value)
  if form == 'json' then
    remember(key, value, row_life)
    return
  end
  -- every value of the object is a string here, so cjson has no number to damage
  local fields = {}
  for name, text in pairs(cjson.decode(value)) do
    fields[#fields + 1] = name
    fields[#fields + 1] = text
  end
  redis.call('DEL', key)
  for first = 1, #fields, 200 do
    redis.call('HSET', key, unpack(fields, first, math.min(first + 199, #fields)))
  end
  if row_life ~= '0' then
    redis.call('PEXPIRE', key, row_life)
  end
end

local function sets_of(held)
  return held and string.sub(held, 18) or ''
end

local function move(row, old, new)
  if old == '' and new == '' then
    return -- nearly always: a table without lookups
  end
  local kept = {}
  for set in string.gmatch(new, '[^\n]+') do
    kept[set] = true
    redis.call('SADD', set, row)
  end
  for set in string.gmatch(old, '[^\n]+') do
    if not kept[set] then
      redis.call('SREM', set, row)
    end
  end
end

local call = redis.call
local missed = {}
for place = 1, #KEYS / 2 do
  local row, mark = KEYS[2 * place - 1], KEYS[2 * place]
  local at = 5 * place
  local version, op, expected, sets = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local held = call('GET', mark)
  local wanted = not held or string.sub(held, 1, 16) < version
  if not wanted and op ~= 'd' and string.sub(held, 1, 17) ~= version .. 'd' and string.sub(held, 1, 16) == version then
    -- evicted, expired, or written before the lookups were asked for: a repeat brings it back
    wanted = sets_of(held) ~= sets or redis.call('EXISTS', row) == 0
  end
  if wanted and expected ~= '' and held ~= expected then
    missed[#missed + 1] = place
  elseif wanted then
    if op == 'd' then
      redis.call('DEL', row)
      move(row, sets_of(held), '')
      remember(mark, version .. 'd', tombstone_life)
    else
      write(row, ARGV[at + 5]) -- the row first: a version without its row would be believed
      move(row, sets_of(held), sets)
      remember(mark, sets == '' and version or version .. '\n' .. sets, version_life)
    end
    if channel ~= '' then
      redis.call('PUBLISH', channel, row)
    end
  end
end
return missed
