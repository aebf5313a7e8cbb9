-- Customers, products, orders and their items. Items come from another service than orders, possibly before them, so
-- they have no foreign key to their order.
create table customers (
    id   bigint primary key,
    name text not null,
    city text not null
);
create table products (
    id    bigint primary key,
    title text not null,
    price numeric(10, 2) not null
);
create table orders (
    id          bigint primary key,
    customer_id bigint not null references customers,
    status      text not null
);
create table items (
    id         bigint primary key,
    order_id   bigint not null,
    product_id bigint not null references products,
    quantity   integer not null
);

insert into customers values (1, 'Ada', 'Aarhus'), (2, 'Ben', 'Bilbao');
insert into products values (1, 'desk lamp', 39.90), (2, 'desk', 199.00), (3, 'chair', 89.50);
insert into orders values (1, 1, 'placed'), (2, 2, 'placed');
insert into items values (11, 1, 1, 2), (12, 1, 2, 1), (21, 2, 3, 4);
