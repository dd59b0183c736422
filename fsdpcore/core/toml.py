"""Files of TOML whose tables have known keys: read, with words for what is wrong in them."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from fsdpcore.core.errors import ConfigError
from fsdpcore.core.text import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


class Table(dict[str, Any]):
    """A table of a file, with its place in words."""

    def __init__(self, content: object, where: str) -> None:
        if not isinstance(content, Mapping):
            raise ConfigError(f"{where} is not a table")
        super().__init__(content)
        self.where = where

    def check_keys(self, known: Iterable[str]) -> None:
        """Raise ConfigError for a key that is not one of these."""
        names = list(known)
        for key in self:
            if key not in names:
                raise ConfigError(f"{self.where}: unknown key {key!r}{nearest(key, names)}")

    def tables(self, key: str) -> list[Table]:
        """Return the list of tables of a key, each with its number; none where there is no key."""
        entries = self.get(key, [])
        if not isinstance(entries, list):
            raise ConfigError(f"{self.where} {key} is not a list of tables")
        return [Table(entry, f"{self.where} {key} {n}") for n, entry in enumerate(entries, 1)]


def parse_toml(text: str, source: str) -> Table:
    """Read the text of a file.

    Raises:
        ConfigError: it is not TOML.
    """
    try:
        return Table(tomllib.loads(text), source)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
