-- Writes rows, each guarded by its version. Versions are 16 hexadecimal digits and are compared as text: Lua's numbers
-- are doubles, in which two LSNs above 2^53 can be equal.
--
-- KEYS  row, version, row, version, ...
-- ARGV  form (json | hash), lifetime of a row, of its version, of a tombstone (milliseconds, 0 for ever), then for each
--       row: version, op (u | d), what the version key must still hold (empty: anything older), value
-- The version key holds the version, and a `d` behind it when the row is deleted.
-- Returns the places of the rows whose version key had changed in between; they were not written.

local form, row_life, version_life, tombstone_life = ARGV[1], ARGV[2], ARGV[3], ARGV[4]

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

local missed = {}
for place = 1, #KEYS / 2 do
  local row, mark = KEYS[2 * place - 1], KEYS[2 * place]
  local at = 4 * place
  local version, op, expected, value = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local held = redis.call('GET', mark)
  local wanted = not held or string.sub(held, 1, 16) < version
  if not wanted and op == 'u' and held == version then
    wanted = redis.call('EXISTS', row) == 0 -- evicted or expired: a repeat brings it back
  end
  if wanted and expected ~= '' and held ~= expected then
    missed[#missed + 1] = place
  elseif wanted and op == 'd' then
    redis.call('DEL', row)
    remember(mark, version .. 'd', tombstone_life)
  elseif wanted then
    write(row, value) -- the row first: a version without its row would be believed
    remember(mark, version, version_life)
  end
end
return missed
