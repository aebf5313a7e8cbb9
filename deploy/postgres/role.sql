-- The least that Millrace needs, run by the owner of the tables.
--   psql -v password=… -v tables='public.users, public.orders' -f role.sql
-- REPLICATION lets it read the WAL of published tables; SELECT lets it take snapshots. No superuser, no CREATE.
create role millrace login replication password :'password';
grant select on :tables to millrace;
-- An explicit list: FOR ALL TABLES would publish every table that is created later.
-- Tables that inherit from one of these would be published with it: create it with ONLY before such a name then.
create publication millrace for table :tables with (publish_via_partition_root = true);
-- A table under row security is refused unless the role may bypass it; consider what that allows:
--   alter role millrace bypassrls;
