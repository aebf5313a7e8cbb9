-- What the view must be equal to in the end, late orders included. Times as the log writes them.
select
    to_char(date_trunc('minute', ordered_at at time zone 'UTC'), 'YYYY-MM-DD"T"HH24:MI:SS"Z"') as window_start,
    region,
    count(*) as orders,
    sum(amount) as revenue
from orders
group by 1, 2
