"""The settings of an OpenSearch sink."""

import re
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from cdc.config.secret import Secret
from cdc.config.settings import SecretField, SinkSettings
from cdc.model import TableId

_INDEX = re.compile(r"[a-z0-9][a-z0-9._-]*")


class OpenSearchSettings(SinkSettings):
    """An OpenSearch cluster."""

    shares_targets: ClassVar[bool] = True
    kind: Literal["opensearch"] = "opensearch"
    url: str = "http://127.0.0.1:9200"
    """http:// or https://; without a password in it."""
    username: str = ""
    password: SecretField = Secret("")
    ca_file: str = ""
    """Certificate authority for https; empty: the system's."""
    prefix: str = Field("", pattern=r"^([a-z0-9][a-z0-9._-]{0,80})?$")
    """Prefix of every alias and index."""
    shards: int = Field(1, ge=1)
    replicas: int = Field(1, ge=0)
    routing: dict[str, str] = Field(default_factory=dict)
    """Column whose value selects the shard of a table's documents: `public.order_lines: order_id`."""
    refresh: Literal["", "wait_for", "true"] = ""
    """The `refresh` parameter of bulk requests. Empty: rows become searchable at the index's next refresh."""
    refresh_interval: str = Field("", pattern=r"^(-1|[0-9]+(ms|s|m))?$")
    """How often written rows become searchable, for instance 5s; empty: OpenSearch's default, a second."""
    index: dict[str, Any] = Field(default_factory=dict)
    """Further settings for new indexes (analysis, codec, …)."""
    template: bool = True
    """Write an index template for each table, so that an index created by a restore or by hand has its mapping."""
    bulk_mb: float = Field(5.0, gt=0, le=90)
    """Size of a bulk request; OpenSearch refuses more than 100 MB."""
    tombstone_days: float = Field(7.0, gt=0)
    """How long tombstones of deleted rows are kept: longer than any replay reaches back."""
    metadata: str = Field("millrace", pattern=r"^[a-z][a-z0-9_]{0,40}$")
    """Field of a document with its version."""
    fields: dict[str, dict[str, dict[str, Any]]] = Field(default_factory=dict)
    """Mapping of single columns: `public.users: {bio: {type: text, analyzer: english}}`."""

    def index_settings(self) -> dict[str, Any]:
        """The settings of a new index."""
        own = {"number_of_shards": self.shards, "number_of_replicas": self.replicas}
        return {**self.index, **own, **self.dynamic_settings()}

    def dynamic_settings(self) -> dict[str, Any]:
        """The settings that also change in an existing index."""
        interval = {"refresh_interval": self.refresh_interval} if self.refresh_interval else {}
        return {"number_of_replicas": self.replicas, **interval}

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if "@" in url:
            raise ValueError("the url contains credentials; use username and password instead")
        if not url.startswith(("http://", "https://")):
            raise ValueError("the url must begin with http:// or https://")
        return url

    @model_validator(mode="after")
    def _targets_are_indexes(self) -> "OpenSearchSettings":
        for table, shape in self.shape.items():
            if shape.target and not _INDEX.fullmatch(shape.target):
                raise ValueError(f"shape: {shape.target!r} is no name of an index: use a-z, 0-9, dots, - and _")
            if str(table) in self.routing and self.sharing(table):
                raise ValueError(f"{table} shares an index with other tables: remove its routing, or its target")
        return self

    @field_validator("routing")
    @classmethod
    def _name_tables(cls, routing: dict[str, str]) -> dict[str, str]:
        return {str(TableId.parse(table)): column for table, column in routing.items()}


SETTINGS = OpenSearchSettings
