"""The local S3 server keeps the promise that Delta's commits stand on: a conditional PUT has one winner."""

import threading
from collections import Counter

import pyarrow as pa
import pyarrow.fs
import pytest
from deltalake import DeltaTable, write_deltalake

from tests.fix_s3 import S3Server

WRITERS, COMMITS = 4, 3


def test_concurrent_commits_to_one_delta_table_are_all_kept_and_outlive_a_crash(
    s3_server: S3Server, s3_url: str
) -> None:
    options = s3_server.storage_options
    write_deltalake(s3_url, pa.table({"writer": pa.array([], pa.int64())}), storage_options=options)

    def write(number: int) -> None:
        for _ in range(COMMITS):
            write_deltalake(s3_url, pa.table({"writer": [number]}), mode="append", storage_options=options)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(WRITERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    s3_server.kill()
    s3_server.start()
    table = DeltaTable(s3_url, storage_options=options)
    assert table.version() == WRITERS * COMMITS
    rows = table.to_pyarrow_table().column("writer").to_pylist()
    assert Counter(rows) == dict.fromkeys(range(WRITERS), COMMITS)


def test_a_request_without_the_secret_key_is_refused(s3_server: S3Server) -> None:
    endpoint = s3_server.url.removeprefix("http://")
    stranger = pa.fs.S3FileSystem(
        access_key="millrace", secret_key="guess", endpoint_override=endpoint, scheme="http", region="us-east-1"
    )
    with pytest.raises(OSError, match=r"ACCESS_DENIED|SIGNATURE|403"):
        stranger.get_file_info(pa.fs.FileSelector("millrace"))
