-- Writes each row that is newer than the stored one. Versions are 16 hexadecimal digits, compared as text: Lua's
-- numbers are doubles, in which two LSNs above 2^53 can be equal.
--
-- KEYS  row, version, row, version, ...
-- ARGV  format (json | hash), lifetime of a row, of its version, of a tombstone (milliseconds, 0: for ever), channel
--       (empty: none), then for each row: version, op (u | d), required value of the version key (empty: any older
--       version), the sets of the row (one on each line), value
-- The version key contains the version, followed by a `d` if the row is deleted, or by a line for each set of the row.
-- So the call that writes a row also removes it from its old sets; in a cluster they are in the same slot.
-- Returns the numbers of the rows whose version key did not have the required value; they were not written.

local format, row_ttl, version_ttl, tombstone_ttl, channel = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]

local function set(key, value, ttl)
  if ttl == '0' then
    redis.call('SET', key, value)
  else
    redis.call('SET', key, value, 'PX', ttl)
  end
end

local function write(key, value)
  if format == 'json' then
    set(key, value, row_ttl)
    return
  end
  -- every value of the object is a string, so cjson cannot round numbers
  local fields = {}
  for name, text in pairs(cjson.decode(value)) do
    fields[#fields + 1] = name
    fields[#fields + 1] = text
  end
  redis.call('DEL', key)
  for first = 1, #fields, 200 do
    redis.call('HSET', key, unpack(fields, first, math.min(first + 199, #fields)))
  end
  if row_ttl ~= '0' then
    redis.call('PEXPIRE', key, row_ttl)
  end
end

local function sets_of(stored)
  return stored and string.sub(stored, 18) or ''
end

local function change_sets(row, old, new)
  if old == '' and new == '' then
    return -- as in every table without lookups
  end
  local kept = {}
  for name in string.gmatch(new, '[^\n]+') do
    kept[name] = true
    redis.call('SADD', name, row)
  end
  for name in string.gmatch(old, '[^\n]+') do
    if not kept[name] then
      redis.call('SREM', name, row)
    end
  end
end

local conflicts = {}
for number = 1, #KEYS / 2 do
  local row, version_key = KEYS[2 * number - 1], KEYS[2 * number]
  local at = 5 * number
  local version, op, expected, sets = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3], ARGV[at + 4]
  local stored = redis.call('GET', version_key)
  local due = not stored or string.sub(stored, 1, 16) < version
  if not due and op ~= 'd' and string.sub(stored, 1, 17) ~= version .. 'd' and string.sub(stored, 1, 16) == version then
    -- the same version again: write it if the row was evicted or has expired, or if its lookups are new
    due = sets_of(stored) ~= sets or redis.call('EXISTS', row) == 0
  end
  if due and expected ~= '' and stored ~= expected then
    conflicts[#conflicts + 1] = number
  elseif due then
    if op == 'd' then
      redis.call('DEL', row)
      change_sets(row, sets_of(stored), '')
      set(version_key, version .. 'd', tombstone_ttl)
    else
      write(row, ARGV[at + 5]) -- the row first: if the script fails here, no version claims a row that is missing
      change_sets(row, sets_of(stored), sets)
      set(version_key, sets == '' and version or version .. '\n' .. sets, version_ttl)
    end
    if channel ~= '' then
      redis.call('PUBLISH', channel, row)
    end
  end
end
return conflicts
