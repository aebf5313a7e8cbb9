-- One table of ten columns of mixed types, default replica identity. Filled by workload.load.
DROP TABLE IF EXISTS public.bench_orders;
CREATE TABLE public.bench_orders (
  id         bigint PRIMARY KEY,
  qty        integer NOT NULL,
  amount     numeric(12,2) NOT NULL,
  note       text NOT NULL,                 -- 100 characters
  updated_at timestamptz NOT NULL,
  attrs      jsonb NOT NULL,                -- about 70 bytes
  active     boolean NOT NULL,
  ref        uuid NOT NULL,
  due        date NOT NULL,
  score      double precision NOT NULL
);
