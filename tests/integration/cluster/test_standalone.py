"""The local Spark cluster: its members come back after kill -9, and it is closed to strangers."""

import ipaddress
import json
import os
import signal
import urllib.request

import psutil

from deploy.local.process import identify
from tests.fix_cluster import SparkCluster
from tests.fix_processes import wait_until
from tests.fix_servers import LocalServer


def alive_workers(cluster: SparkCluster) -> set[int]:
    """Ports of the workers that the master would give work to."""
    page = f"http://127.0.0.1:{cluster.master_page}/json/"
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(page, timeout=10) as answer:
        return {worker["port"] for worker in json.load(answer)["workers"] if worker["state"] == "ALIVE"}


def test_a_killed_worker_and_a_killed_master_come_back_to_the_same_cluster(spark_cluster: SparkCluster) -> None:
    first, second = spark_cluster.workers
    os.kill(first.pid, signal.SIGKILL)
    wait_until(lambda: alive_workers(spark_cluster) == {second.port}, 30, "the master misses the killed worker")
    first.start()
    assert alive_workers(spark_cluster) == {first.port, second.port}
    spark_cluster.master.kill()
    spark_cluster.master.start()
    both = {first.port, second.port}
    wait_until(lambda: alive_workers(spark_cluster) == both, 60, "the new master has the old workers")
    assert identify(second.pid) is not None


def listening(server: LocalServer) -> set[str]:
    return {
        entry.laddr.ip
        for entry in psutil.Process(server.pid).net_connections("inet")
        if entry.status == psutil.CONN_LISTEN
    }


def test_the_cluster_listens_on_loopback_only_and_shows_its_secret_to_nobody(spark_cluster: SparkCluster) -> None:
    secret = spark_cluster.settings["secrets"]["spark.authenticate.secret"]
    for server in (spark_cluster.master, *spark_cluster.workers):
        assert {ipaddress.ip_address(ip.removeprefix("::ffff:")).is_loopback for ip in listening(server)} == {True}
        assert secret not in " ".join(psutil.Process(server.pid).cmdline())
        assert secret not in server.log.read_text()
        with_secret = [path for path in server.data.rglob("*.properties") if secret in path.read_text()]
        assert {path.stat().st_mode & 0o777 for path in with_secret} == {0o600}


def test_no_port_of_the_master_takes_submissions_without_the_secret(spark_cluster: SparkCluster) -> None:
    process = psutil.Process(spark_cluster.master.pid)
    ports = {entry.laddr.port for entry in process.net_connections("inet") if entry.status == psutil.CONN_LISTEN}
    assert ports == {spark_cluster.master.port, spark_cluster.master_page}
