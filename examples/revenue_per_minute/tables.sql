-- Orders of shops whose tills are not always online: an order may come long after it was made (ordered_at).
create table orders (
    id         bigint primary key,
    region     text not null,
    amount     numeric(10, 2) not null,
    ordered_at timestamptz not null
);

insert into orders values
    (1, 'north', 20.00, '2026-03-02 10:00:05+00'),
    (2, 'north', 12.50, '2026-03-02 10:00:20+00'),
    (3, 'south', 99.90, '2026-03-02 10:00:40+00');
