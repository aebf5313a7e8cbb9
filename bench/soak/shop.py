"""The workload of a soak test: customers on several connections, and sometimes transactions that are hard to capture.

Rows that are added are removed again, so that any growth during a soak test is a defect.
"""

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psycopg

from deploy.demo.shop import Customers

_KEPT = 4000
_TIDY = (
    "delete from page_views where id in (select id from page_views order by viewed_at desc offset %s)",
    "delete from logins where id in (select id from logins order by id desc offset %s)",
    "delete from orders where id in (select id from orders order by id desc offset %s)",
    "delete from users u where id > 500 and not exists (select from orders o where o.user_id = u.id)"
    " and not exists (select from page_views v where v.user_id = u.id)"
    " and not exists (select from logins l where l.user_id = u.id) and id in (select id from users order by id desc"
    " offset %s)",
)
_STORMS = (
    "update products set stock = stock + 1000, details = details || jsonb_build_object('storm', random())",
    "update order_items set line = -line where order_id in (select id from orders order by random() limit 20)",
    "update orders set note = repeat(md5(random()::text), 400) where id in (select id from orders"
    " order by random() limit 20)",
    "insert into page_views (user_id, path) select 1 + n % 500, '/storm/' || n from generate_series(1, 3000) n",
    "truncate logins",
    "do $$ begin begin update users set city = 'nowhere'; raise exception 'no'; exception when others then null; end;"
    " update users set city = 'Aarhus' where id = 1; end $$",
)
"""Whole tables, changed keys, values stored out of line, a large transaction, a truncate, a savepoint rolled back."""

Connect = Callable[[], psycopg.Connection]


class Crowd:
    """Customers in separate threads; each reconnects when it loses its connection."""

    def __init__(self, connect: Connect, customers: int = 3, pause: float = 0.03, seed: int = 1) -> None:
        self._connect = connect
        self._pause = pause
        self._seed = seed
        self._stop = threading.Event()
        self._counts = [0] * (customers + 1)
        works = [*(self._shop for _ in range(customers)), self._storm]
        self._threads = [
            threading.Thread(target=self._keep, args=(work, number), name=f"customer-{number}")
            for number, work in enumerate(works)
        ]

    @property
    def committed(self) -> int:
        """Transactions so far."""
        return sum(self._counts)

    @contextmanager
    def at_work(self) -> Iterator["Crowd"]:
        """Run the customers until the end of the block."""
        for thread in self._threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(60)

    def _keep(self, work: Callable[[psycopg.Connection, int, int], None], number: int) -> None:
        seed = self._seed * 1000 + number
        while not self._stop.is_set():
            seed += 100
            with suppress(psycopg.Error, OSError, KeyError), self._connect() as connection:
                work(connection, number, seed)
            self._stop.wait(0.3)

    def _shop(self, connection: psycopg.Connection, number: int, seed: int) -> None:
        customers = Customers(connection, seed)
        while not self._stop.wait(self._pause):
            with suppress(psycopg.errors.IntegrityError, psycopg.errors.TransactionRollback):
                customers.act()
                self._counts[number] += 1

    def _storm(self, connection: psycopg.Connection, number: int, seed: int) -> None:
        chance = random.Random(seed)
        while not self._stop.wait(chance.uniform(1, 4) + 10 * self._pause):
            with suppress(psycopg.errors.IntegrityError, psycopg.errors.TransactionRollback):
                connection.execute(chance.choice(_STORMS).encode())
                for statement in _TIDY:
                    connection.execute(statement.encode(), (_KEPT,))
                self._counts[number] += 1
