"""`millrace local`: real servers on this machine, for development and for the demo."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from cdc.artifacts.folders import home_folder
from cdc.cli.output import ERR, OUT, JsonOption, print_json, print_table
from cdc.errors import ConfigError

if TYPE_CHECKING:
    from cdc.artifacts.progress import Report
    from deploy.local.server import Running, Server

app = typer.Typer(help="Real servers on this machine, without Docker.", no_args_is_help=True)

HomeOption = Annotated[
    Path | None, typer.Option("--home", help="Home folder; default: MILLRACE_HOME, else .millrace.", show_default=False)
]
OnlyOption = Annotated[
    list[str] | None, typer.Option("--only", metavar="SERVER", help="Start only this server; repeat for several.")
]
PortOption = Annotated[
    list[str] | None, typer.Option("--port", metavar="SERVER=PORT", help="Use this port, for instance postgres=5433.")
]


@app.command()
def up(
    *,
    only: OnlyOption = None,
    kafka: Annotated[bool, typer.Option("--kafka", help="Also Kafka.")] = False,
    kafka_brokers: Annotated[
        int, typer.Option("--kafka-brokers", metavar="N", help="Also a Kafka cluster of N brokers, at least 3.")
    ] = 0,
    connect: Annotated[bool, typer.Option("--connect", help="Also Kafka Connect with Debezium.")] = False,
    s3: Annotated[bool, typer.Option("--s3", help="Also an S3 server with a bucket `millrace`.")] = False,
    spark_workers: Annotated[
        int, typer.Option("--spark-workers", metavar="N", min=0, max=32, help="Also a Spark master with N workers.")
    ] = 0,
    spark_cores: Annotated[
        int, typer.Option("--spark-cores", metavar="N", min=1, help="Tasks at the same time on each Spark worker.")
    ] = 2,
    port: PortOption = None,
    home: HomeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start the servers that do not run yet. They run until `millrace local down`.

    Example: millrace local up
    """
    from deploy.local.cluster.spark import SparkWorker
    from deploy.local.kafka import brokers
    from deploy.local.servers import STANDARD, Servers, known_servers

    workers = (SparkWorker(number, spark_cores) for number in range(1, spark_workers + 1))
    several: list[Server] = [*brokers(_at_least_three(kafka_brokers)), *workers]
    names = [*(only or STANDARD), *(["kafka"] if kafka else []), *(["connect"] if connect else [])]
    names += ["s3"] if s3 else []
    names += [server.name for server in several]
    with _reporting(quiet=as_json) as report, _interruptible():
        servers = Servers(home or home_folder(), known_servers(*several), report=report)
        running = servers.up(names, _ports(port or []))
    _show(running, as_json)


@app.command()
def status(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Show the running servers and their addresses.

    Example: millrace local status --json
    """
    from deploy.local.servers import Servers

    running = Servers(home or home_folder()).status()
    if not running and not as_json:
        OUT.print("No server runs here. Start them: millrace local up")
        return
    _show(running, as_json)


@app.command()
def down(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """Stop every server of the home folder; their data is kept.

    Example: millrace local down
    """
    from deploy.local.servers import Servers

    stopped = Servers(home or home_folder()).down()
    if as_json:
        print_json({"stopped": stopped})
    else:
        OUT.print(f"Stopped {', '.join(stopped)}." if stopped else "Nothing was running.")


def _at_least_three(brokers: int) -> int:
    if brokers in {1, 2}:
        raise ConfigError(
            f"`--kafka-brokers {brokers}` is too few for topics with three replicas.",
            "Start 3 or more, or one broker without replication: --kafka",
        )
    return brokers


def _ports(given: list[str]) -> dict[str, int]:
    ports = {}
    for text in given:
        name, _, number = text.partition("=")
        if not number.isdigit() or not 0 < int(number) < 65536:
            raise ConfigError(f"`--port {text}` is not NAME=NUMBER.", "For instance: --port postgres=5433")
        ports[name] = int(number)
    return ports


def _show(running: "dict[str, Running]", as_json: bool) -> None:
    if as_json:
        print_json(
            {
                name: {
                    "host": it.host,
                    "port": it.port,
                    "pid": it.pid,
                    "address": it.address,
                    "log": str(it.log),
                    "data": str(it.data),
                }
                for name, it in running.items()
            }
        )
        return
    print_table(("SERVER", "PID", "ADDRESS", "LOG"), [(it.name, it.pid, it.address, it.log) for it in running.values()])


@contextmanager
def _reporting(*, quiet: bool) -> "Iterator[Report]":
    """A spinner with the latest line on standard error; plain lines if that is not a terminal."""
    if quiet:
        yield lambda _line: None
    elif not ERR.is_terminal:
        yield lambda line: ERR.print(line, markup=False)
    else:
        columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
        with Progress(*columns, console=ERR, transient=True) as progress:
            task = progress.add_task("starting")
            yield lambda line: progress.update(task, description=line)


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM ends `up` like Ctrl-C: the servers that it has started are stopped again."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
