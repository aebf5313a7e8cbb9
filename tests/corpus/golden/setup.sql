-- The tables behind debezium.jsonl. Rows inserted here are snapshot rows.
DROP SCHEMA IF EXISTS smp CASCADE; CREATE SCHEMA smp;
CREATE EXTENSION IF NOT EXISTS hstore; CREATE EXTENSION IF NOT EXISTS citext; CREATE EXTENSION IF NOT EXISTS ltree;
CREATE TYPE smp.mood AS ENUM ('sad','ok','happy');
CREATE DOMAIN smp.posint AS int CHECK (VALUE > 0);
CREATE TYPE smp.comp AS (a int, b text);
CREATE TABLE smp.bench_orders (id bigint PRIMARY KEY, qty integer NOT NULL, amount numeric(12,2) NOT NULL, note text NOT NULL, updated_at timestamptz NOT NULL,
  attrs jsonb NOT NULL, active boolean NOT NULL, ref uuid NOT NULL, due date NOT NULL, score double precision NOT NULL);
INSERT INTO smp.bench_orders VALUES (1,7,12345.67,rpad('note ',100,'x'),'2024-01-01 00:00:01.001001+00','{"k":1,"tag":"t1","nested":{"a":1,"b":[1,2]}}',true,'a176b04d-f256-e82d-5862-e61a73cca8cf','2023-10-27',0.1),
 (2,-7,-0.01,rpad('ünïcødé 日本 🎉 "quoted" \back',100,'y'),'1969-12-31 23:59:59.999999+00','{}',false,'00000000-0000-0000-0000-000000000000','1969-12-31',-1.5e300);
CREATE TABLE smp.all_types (
 id bigint PRIMARY KEY, c_int2 smallint, c_int4 integer, c_int8 bigint, c_real real, c_double double precision,
 c_num_10_2 numeric(10,2), c_num_38_10 numeric(38,10), c_num_5_0 numeric(5,0), c_num numeric, c_money money, c_bool boolean,
 c_char char(10), c_varchar varchar(50), c_text text, c_citext citext, c_bytea bytea, c_uuid uuid, c_json json, c_jsonb jsonb, c_xml xml,
 c_date date, c_time time, c_time0 time(0), c_time3 time(3), c_timetz timetz, c_ts timestamp, c_ts0 timestamp(0), c_ts3 timestamp(3), c_tstz timestamptz, c_tstz3 timestamptz(3), c_interval interval,
 c_bit1 bit(1), c_bit8 bit(8), c_varbit varbit(20), c_inet inet, c_cidr cidr, c_macaddr macaddr, c_macaddr8 macaddr8,
 c_enum smp.mood, c_domain smp.posint, c_comp smp.comp, c_hstore hstore, c_ltree ltree, c_tsvector tsvector, c_tsquery tsquery,
 c_int4range int4range, c_int8range int8range, c_numrange numrange, c_tsrange tsrange, c_tstzrange tstzrange, c_daterange daterange,
 c_point point, c_line line, c_lseg lseg, c_box box, c_path path, c_polygon polygon, c_circle circle,
 c_int_arr integer[], c_int2_arr smallint[], c_int8_arr bigint[], c_text_arr text[], c_varchar_arr varchar(10)[], c_num_arr numeric(10,2)[], c_dbl_arr double precision[], c_bool_arr boolean[], c_uuid_arr uuid[], c_date_arr date[], c_ts_arr timestamp[], c_tstz_arr timestamptz[], c_time_arr time[], c_enum_arr smp.mood[], c_jsonb_arr jsonb[], c_inet_arr inet[], c_bytea_arr bytea[],
 c_oid oid, c_name name, c_lsn pg_lsn, c_gen integer GENERATED ALWAYS AS (c_int4 * 2) STORED, c_dflt text DEFAULT 'dflt', c_dflt_int integer NOT NULL DEFAULT 42, c_dflt_ts timestamptz DEFAULT '2020-02-02 02:02:02+00');
CREATE TABLE smp.toasted (id int PRIMARY KEY, n int, t text, b bytea, a text[], j jsonb);
ALTER TABLE smp.toasted ALTER t SET STORAGE EXTERNAL, ALTER b SET STORAGE EXTERNAL, ALTER a SET STORAGE EXTERNAL, ALTER j SET STORAGE EXTERNAL;
CREATE TABLE smp.ident_full (id int PRIMARY KEY, n int, t text); ALTER TABLE smp.ident_full REPLICA IDENTITY FULL; INSERT INTO smp.ident_full VALUES (1,1,'one');
CREATE TABLE smp.nopk (n int, t text); ALTER TABLE smp.nopk REPLICA IDENTITY FULL; INSERT INTO smp.nopk VALUES (1,'snap');
CREATE TABLE smp.comp_pk (a int, b varchar(10), v numeric(8,3), PRIMARY KEY (b, a)); INSERT INTO smp.comp_pk VALUES (1,'k',1.5);
CREATE TABLE smp.evolve (id int PRIMARY KEY, v text); INSERT INTO smp.evolve VALUES (1,'before ddl');
CREATE TABLE smp.trunc (id int PRIMARY KEY, v text); INSERT INTO smp.trunc VALUES (1,'x'),(2,'y');
CREATE TABLE smp.incr (id int PRIMARY KEY, v text); INSERT INTO smp.incr SELECT g, 'row '||g FROM generate_series(1,5) g;
CREATE TABLE smp.parted (id int, k int, v text, PRIMARY KEY (id,k)) PARTITION BY RANGE (k);
CREATE TABLE smp.parted_1 PARTITION OF smp.parted FOR VALUES FROM (0) TO (10); CREATE TABLE smp.parted_2 PARTITION OF smp.parted FOR VALUES FROM (10) TO (20);
INSERT INTO smp.parted VALUES (1,1,'p1');
CREATE TABLE smp."Mixed Case-Table" ("Id" int PRIMARY KEY, "My Col" text, "v.dot" int); INSERT INTO smp."Mixed Case-Table" VALUES (1,'q',2);
CREATE TABLE smp.special_num (id int PRIMARY KEY, n numeric, n102 numeric(10,2), d double precision, r real);
CREATE TABLE smp.special_time (id int PRIMARY KEY, d date, ts timestamp, tstz timestamptz, iv interval);
INSERT INTO smp.all_types VALUES (1,
 12,1234,123456789012,1.5,2.718281828459045, 12345.67,1234567890123456789.0123456789,12345,3.14159,'$1,234.56',true,
 'abc','varchar v','text ü 日本','CiText','\xdeadbeef00','a176b04d-f256-e82d-5862-e61a73cca8cf','{"b": 1,  "a":[1,2,null]}','{"b": 1,  "a":[1,2,null]}','<a x="1">t</a>',
 '2024-02-29','13:14:15.123456','13:14:15','13:14:15.123','13:14:15.123456+02','2024-02-29 13:14:15.123456','2024-02-29 13:14:15','2024-02-29 13:14:15.123','2024-02-29 13:14:15.123456+02','2024-02-29 13:14:15.123+00','1 year 2 months 3 days 4 hours 5 minutes 6.789 seconds',
 B'1',B'10100101',B'1010','192.168.1.10/24','10.0.0.0/8','08:00:2b:01:02:03','08:00:2b:01:02:03:04:05',
 'happy',5,ROW(1,'x'),'"k1"=>"v1","k2"=>NULL','Top.Science.Astronomy','a fat cat sat'::tsvector,'fat & cat'::tsquery,
 '[1,10)','[1,100)','[1.5,2.5]','[2024-01-01 00:00,2024-01-02 00:00)','[2024-01-01 00:00+00,2024-01-02 00:00+00)','[2024-01-01,2024-02-01)',
 '(1.5,2.5)','{1,2,3}','[(0,0),(1,1)]','((0,0),(1,1))','[(0,0),(1,1),(2,0)]','((0,0),(1,1),(2,0))','<(0,0),5>',
 '{1,2,NULL}','{1,2}','{1,9999999999}','{a,"b c",NULL,"q\"x"}','{ab,cd}','{1.50,2.25}','{1.5,2.5}','{t,f}','{a176b04d-f256-e82d-5862-e61a73cca8cf}','{2024-01-01,2024-02-29}','{"2024-01-01 01:02:03.123456"}','{"2024-01-01 01:02:03.123456+00"}','{01:02:03}','{sad,happy}',ARRAY['{"a":1}'::jsonb],'{10.0.0.1}',ARRAY['\x0102'::bytea],
 42,'nm','16/B374D848',DEFAULT,DEFAULT,DEFAULT,DEFAULT);
