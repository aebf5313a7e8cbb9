-- Step: An item of order 3 comes before the order: it waits, and there is no document yet.
insert into items values (31, 3, 1, 1);

-- Step: Order 3 comes: its document has the item that waited.
insert into orders values (3, 1, 'placed');

-- Step: Ada moves to Chania: the documents of both her orders change.
update customers set city = 'Chania' where id = 1;

-- Step: The desk lamp gets a new price, two levels below the order: every document with a lamp changes.
update products set price = 34.90 where id = 1;

-- Step: The desk moves from order 1 to order 2: both documents change.
update items set order_id = 2 where id = 12;

-- Step: Order 3 is deleted: its document goes; its item would wait for the order to come again.
delete from orders where id = 3;
