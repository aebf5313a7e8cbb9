-- Who follows whom, and what they post.
create table posts (
    id     bigint primary key,
    author text not null,
    body   text not null
);
create table follows (
    reader text,
    author text,
    primary key (reader, author)
);

insert into posts values (1, 'ada', 'Hello'), (2, 'ben', 'It rains');
insert into follows values ('cleo', 'ada'), ('cleo', 'ben'), ('dan', 'ada');
