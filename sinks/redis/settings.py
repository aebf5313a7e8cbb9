"""The settings of a Redis sink, and which of them cannot be combined."""

from typing import Literal

from pydantic import Field, field_validator, model_validator

from cdc.config.secret import Secret
from cdc.config.settings import SecretField, SinkSettings
from cdc.model import TableId
from sinks.redis.keys import RESERVED, tag_of


class RedisSettings(SinkSettings):
    """A Redis server or cluster."""

    kind: Literal["redis"] = "redis"
    url: str = "redis://127.0.0.1:6379/0"
    """redis:// or rediss:// (TLS); without a password in it."""
    username: str = ""
    password: SecretField = Secret("")
    ca_file: str = ""
    """Certificate authority for rediss://; empty: the system's."""
    cluster: bool = False
    prefix: str = ""
    """Prefix of every key."""
    key: str = "{schema}.{table}:{key}"
    """Name of a row's key. Further braces are a hash tag for Redis Cluster: `{{schema}.{table}}:{key}`."""
    keys: dict[str, str] = Field(default_factory=dict)
    """Names for single tables: `public.users: "user:{key}"`."""
    mode: Literal["rows", "invalidate"] = "rows"
    """Store every row, or only delete the keys of changed rows from a cache that the application fills."""
    form: Literal["json", "hash"] = "json"
    """A row as JSON text, or as a hash of text fields."""
    lookups: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Columns to find rows by; for each value there is a set of the rows' keys: `public.users: [email]`."""
    channel: str = ""
    """Publish the key of every changed row on this channel; empty: nothing is published."""
    ttl_seconds: int = Field(0, ge=0)
    """Rows expire after this time without a change; 0: never."""
    tombstone_seconds: int = Field(7 * 24 * 3600, ge=0)
    """How long the tombstone of a deleted row is kept; 0: for ever."""
    chunk: int = Field(500, ge=1, le=3000)
    """Rows per script call. Redis serves no other client during a call."""

    def templates(self) -> dict[TableId, str]:
        """The names of the rows of single tables."""
        targets = {table: self.template(table) for table in self.shape if self.target(table)}
        return {**{TableId.parse(text): template for text, template in self.keys.items()}, **targets}

    def template(self, table: TableId) -> str:
        """The template for the names of a table's rows."""
        target = self.target(table)
        if target:
            return target if "{key}" in target else f"{target}:{{key}}"
        return self.keys.get(str(table), self.key)

    @field_validator("url")
    @classmethod
    def _no_password(cls, url: str) -> str:
        if "@" in url:
            raise ValueError("the url contains credentials; use username and password instead")
        if not url.startswith(("redis://", "rediss://", "unix://")):
            raise ValueError("the url must begin with redis:// or rediss://")
        return url

    @field_validator("key")
    @classmethod
    def _has_key(cls, template: str) -> str:
        if template.count("{key}") != 1:
            raise ValueError("the name of a row's key must contain {key} once")
        if template.startswith(RESERVED):
            raise ValueError(
                f"the name of a row's key begins with {RESERVED}, which is reserved for Millrace's own keys"
            )
        return template

    @field_validator("keys")
    @classmethod
    def _have_keys(cls, templates: dict[str, str]) -> dict[str, str]:
        return {str(TableId.parse(table)): cls._has_key(template) for table, template in templates.items()}

    @field_validator("lookups")
    @classmethod
    def _name_tables(cls, lookups: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        return {str(TableId.parse(table)): columns for table, columns in lookups.items()}

    @model_validator(mode="after")
    def _fit_together(self) -> "RedisSettings":
        for table in self.shape:
            if self.target(table) and str(table) in self.keys:
                raise ValueError(f"{table} has a name in keys and a target in shape; remove one of them")
        targets = [self._has_key(self.template(table)) for table in self.shape]
        for template in (self.key, *self.keys.values(), *targets):
            tag_of(self.prefix + template)
        if self.lookups and self.mode == "invalidate":
            raise ValueError("lookups need stored rows, and mode invalidate stores none; remove one of the two")
        if self.lookups and self.ttl_seconds:
            raise ValueError("lookups would contain rows that have expired; remove ttl_seconds or lookups")
        return self


SETTINGS = RedisSettings
