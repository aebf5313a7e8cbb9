-- Step: Ada posts: the post is in the timelines of Cleo and Dan, who follow her.
insert into posts values (3, 'ada', 'The mill turns');

-- Step: Dan follows Ben: all of Ben's posts are in his timeline.
insert into follows values ('dan', 'ben');

-- Step: Ada corrects her post: it changes in every timeline.
update posts set body = 'The mill turns again' where id = 3;

-- Step: Cleo unfollows Ada: her posts leave Cleo's timeline, and no other.
delete from follows where reader = 'cleo' and author = 'ada';

-- Step: Ben deletes his post and posts again, in one transaction.
begin;
delete from posts where id = 2;
insert into posts values (4, 'ben', 'The sun shines');
commit;
