-- Step: The first order of minute 10:01. Minute 10:00 stays open for orders that come up to 30 seconds late.
insert into orders values (4, 'north', 7.00, '2026-03-02 10:01:10+00');

-- Step: An order of 10:00:50 comes when others of 10:01:10 were there. Its minute is open, so it is not late.
insert into orders values (5, 'south', 10.10, '2026-03-02 10:00:50+00');

-- Step: An order of 10:01:30 moves the watermark to 10:01:00, 30 seconds before it: minute 10:00 closes and is final.
insert into orders values (6, 'south', 5.00, '2026-03-02 10:01:30+00');

-- Step: A till was offline: an order of 10:00:30 comes after its minute has closed. It corrects the minute and is counted as late.
insert into orders values (7, 'north', 40.00, '2026-03-02 10:00:30+00');

-- Step: Order 3, of the closed minute, turns out to be 9.90 instead of 99.90: that minute is corrected too.
update orders set amount = 9.90 where id = 3;

-- Step: An order of 10:02:45 closes minute 10:01.
insert into orders values (8, 'north', 3.30, '2026-03-02 10:02:45+00');
