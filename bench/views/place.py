"""Servers, database and pipelines of the measurements of views."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.environment import benchmark_postgres, workspace
from bench.sinks.pipeline import Pipeline, SinkEnvironment
from cdc.service.views.view_run import consumer_of
from deploy.local.kafka import Kafka
from deploy.local.opensearch import OpenSearch


@dataclass(slots=True)
class ViewPipeline(Pipeline):
    """A pipeline with views. Its process `views` computes them."""

    views: Sequence[Mapping[str, Any]] = ()
    prefix: str = "bench"
    """Of the topics, if the log is Kafka: `bench.public.orders`. Two pipelines must not share it."""

    @property
    def topics(self) -> dict[str, str]:
        """The topic of each table."""
        return {table: f"{self.prefix}.{table}" for table in self.tables}

    def end(self) -> None:
        """Stop all processes. The views end before capture, which appends what they compute."""
        if "views" in self._processes:
            self._processes["views"].end()
        Pipeline.end(self)

    def computed(self, target: int) -> bool:
        """Whether the log has the rows of every view as of an LSN. Raises RuntimeError if a view has failed."""
        facts = self._status("views").get("views", {})
        states = {name: view["state"] for name, view in facts.items()} if isinstance(facts, dict) else {}
        if failed := [name for name, state in states.items() if state == "failed"]:
            raise RuntimeError(f"view {failed[0]} failed; see {self.folder}")
        reached = {consumer.name: int(consumer.reached) for consumer in self.log().consumers()}
        return all(
            states.get(name) == "live" and reached.get(consumer_of(name), 0) >= target
            for name in (view["name"] for view in self.views)
        )

    def _sections(self) -> dict[str, Any]:
        sections = Pipeline._sections(self)
        if self.views:
            sections["views"] = [dict(view) for view in self.views]
        if self.kind == "kafka":
            kafka = {"kind": "kafka", "bootstrap": self.environment.servers["kafka"].address}
            sections["log"] = {**kafka, "prefix": self.prefix}  # partitions as by default
        return sections


@contextlib.contextmanager
def view_environment(*, opensearch: bool = False) -> Iterator[SinkEnvironment]:
    """Start Postgres, Kafka for the peers, and OpenSearch if it is asked for; stop and remove them at the end."""
    with workspace("views", benchmark_postgres(), Kafka(), OpenSearch()) as place:
        running = place.up("postgres", "kafka", *(("opensearch",) if opensearch else ()))
        yield SinkEnvironment(place.home, place.database(), running)
