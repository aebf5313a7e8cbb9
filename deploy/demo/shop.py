"""The shop's tables, first rows and workload, which is deterministic."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.resources import files

import psycopg

TABLES = ("users", "products", "orders", "order_items", "page_views", "logins")
_CITIES = ("Aarhus", "Bilbao", "Chania", "Łódź", "Ōsaka", "São Paulo", None)
_STATUSES = ("placed", "paid", "packed", "sent", "delivered")
_NOTE = "Please leave it with the neighbour if nobody answers. "


def create(connection: psycopg.Connection) -> None:
    """Create the tables and their first rows; does nothing if the shop has users."""
    schema = files("deploy.demo").joinpath("shop.sql").read_text(encoding="utf-8")
    connection.execute(schema.encode())
    if connection.execute("select exists (select from users)").fetchone() == (True,):
        return
    connection.execute(
        "insert into users (email, name, city) select format('user%s@shop.example', n), 'Customer ' || n,"
        " (array['Aarhus','Bilbao','Chania','Łódź','Ōsaka'])[1 + n % 5] from generate_series(1, 500) n"
    )
    connection.execute(
        "insert into products (sku, title, price, tags, details, stock) select 'SKU-' || n, 'Thing no. ' || n,"
        " (n * 7919 % 10000) / 100.0, array['tag' || n % 7, 'odd \"tag\"'], jsonb_build_object('weight', n % 13,"
        " 'colours', array['red', 'blue']), 1000 from generate_series(1, 200) n"
    )


@dataclass(slots=True)
class Customers:
    """The workload, one transaction per call. The same seed gives the same transactions in the same order."""

    connection: psycopg.Connection
    seed: int = 7
    done: int = 0
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def act(self) -> None:
        """Run one random transaction."""
        actions: list[tuple[Callable[[], None], int]] = [
            (self._view, 40),
            (self._log_in, 15),
            (self._order, 20),
            (self._advance, 15),
            (self._cancel, 5),
            (self._reprice, 4),
            (self._join, 1),
        ]
        chosen = self._random.choices([action for action, _ in actions], [weight for _, weight in actions])[0]
        with self.connection.transaction():
            chosen()
        self.done += 1

    def _user(self) -> int:
        return self._random.randint(1, 500)

    def _view(self) -> None:
        self.connection.execute(
            "insert into page_views (user_id, path, seconds) values (%s, %s, %s)",
            (self._user(), f"/products/{self._random.randint(1, 200)}", self._random.random() * 90),
        )

    def _log_in(self) -> None:
        self.connection.execute(
            "insert into logins (user_id, succeeded, address) values (%s, %s, %s)",
            (self._user(), self._random.random() < 0.9, f"10.0.{self._random.randint(0, 255)}.7"),
        )

    def _order(self) -> None:
        note = _NOTE * self._random.choice((0, 1, 120))  # some notes are large enough to be stored out of line
        row = self.connection.execute(
            "insert into orders (user_id, status, note) values (%s, 'placed', %s) returning id", (self._user(), note)
        ).fetchone()
        assert row is not None
        for line in range(1, self._random.randint(2, 5)):
            self.connection.execute(
                "insert into order_items select %s, %s, id, %s, price from products where id = %s",
                (row[0], line, self._random.randint(1, 3), self._random.randint(1, 200)),
            )
        self.connection.execute(
            "update orders set total = (select sum(quantity * price) from order_items where order_id = id)"
            " where id = %s",
            (row[0],),
        )

    def _some_order(self) -> int | None:
        row = self.connection.execute(
            "select id from orders where id >= %s * (select coalesce(max(id), 0) from orders) order by id limit 1",
            (self._random.random(),),
        ).fetchone()
        return row[0] if row else None

    def _advance(self) -> None:
        self.connection.execute(
            "update orders set status = %s, updated_at = now() where id = %s",
            (self._random.choice(_STATUSES), self._some_order()),
        )

    def _cancel(self) -> None:
        self.connection.execute("delete from orders where id = %s", (self._some_order(),))

    def _reprice(self) -> None:
        self.connection.execute(
            "update products set price = price + 0.01, stock = stock - 1 where id = %s",
            (self._random.randint(1, 200),),
        )

    def _join(self) -> None:
        city = self._random.choice(_CITIES)
        self.connection.execute(
            "insert into users (email, name, city) values (gen_random_uuid() || '@shop.example', 'New customer', %s)",
            (city,),
        )


def run_customers(
    connection: psycopg.Connection, seconds: float, per_second: float, count: Callable[[int], None]
) -> None:
    """Run the workload at an even rate for some seconds; calls `count` with the number of committed transactions."""
    customers = Customers(connection)
    start = time.monotonic()
    while (elapsed := time.monotonic() - start) < seconds:
        if customers.done < elapsed * per_second:
            customers.act()
            count(customers.done)
        else:
            time.sleep(0.002)
