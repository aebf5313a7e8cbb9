-- A small web shop. Every statement may be run again on a shop that exists.
create table if not exists users (
    id         bigint generated always as identity primary key,
    email      text not null unique,
    name       text not null,
    city       text,
    joined_at  timestamptz not null default now()
);
create table if not exists products (
    id         bigint generated always as identity primary key,
    sku        text not null unique,
    title      text not null,
    price      numeric(12, 2) not null,
    tags       text[] not null default '{}',
    details    jsonb not null default '{}',
    stock      integer not null
);
create table if not exists orders (
    id         bigint generated always as identity primary key,
    user_id    bigint not null references users,
    status     text not null,
    total      numeric(12, 2) not null default 0,
    note       text,
    placed_at  timestamptz not null default now(),
    updated_at timestamptz not null default now()
);
create table if not exists order_items (
    order_id   bigint not null references orders on delete cascade,
    line       smallint not null,
    product_id bigint not null references products,
    quantity   integer not null,
    price      numeric(12, 2) not null,
    primary key (order_id, line)
);
create table if not exists page_views (
    id         uuid primary key default gen_random_uuid(),
    user_id    bigint references users,
    path       text not null,
    seconds    double precision,
    viewed_at  timestamptz not null default now()
);
create table if not exists logins (
    id         bigint generated always as identity primary key,
    user_id    bigint not null references users,
    succeeded  boolean not null,
    address    inet,
    at         timestamptz not null default now()
);
