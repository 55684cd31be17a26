"""Secrets of a job: the job stores a reference, and the value is read when it is used."""

import os
import re
from pathlib import Path
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

from elasticrec.config.fields import base_of, expected
from elasticrec.errors import ConfigError

MASK = "***"
# Serialization context key: the copy of a job in a run keeps its references, other output masks them.
REFERENCES = "references"

_ENVIRONMENT = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_FILE = "file:"
_PATTERN = r"^(\$\{[A-Za-z_][A-Za-z0-9_]*\}|file:.+)$"


class Secret:
    """A reference to a secret, `${ENV}` or `file:PATH`; prints as `***`."""

    __slots__ = ("_reference",)

    def __init__(self, reference: str, base: Path | None = None) -> None:
        """Accept only a reference; the error for anything else does not repeat it."""
        if _ENVIRONMENT.fullmatch(reference):
            self._reference = reference
            return
        path = reference.removeprefix(_FILE)
        if path == reference or not path or not path.isprintable():
            raise ConfigError("expected a secret as `${ENV}` or `file:PATH`, got a literal (not shown)")
        self._reference = _FILE + str((base or Path.cwd()) / Path(path).expanduser())

    @property
    def reference(self) -> str:
        """The reference: `${ENV}`, or `file:` and an absolute path."""
        return self._reference

    def reveal(self) -> str:
        """Read and return the secret, without the trailing newline that editors add to files."""
        variable = _ENVIRONMENT.fullmatch(self._reference)
        if variable:
            value = os.environ.get(variable[1])
            if value is None:
                raise ConfigError(f"secret `{self._reference}`: the environment variable is not set")
        else:
            value = self._read_file()
        if not value:
            raise ConfigError(f"secret `{self._reference}`: expected a value, got an empty text")
        return value

    def reveal_token(self) -> str:
        """Return the secret as an HTTP token; it must be visible ASCII."""
        value = self.reveal()
        if not all("!" <= character <= "~" for character in value):
            raise ConfigError(
                f"secret `{self._reference}`: expected visible ASCII without spaces, got other characters"
            )
        return value

    def _read_file(self) -> str:
        try:
            return Path(self._reference.removeprefix(_FILE)).read_text("utf-8").rstrip("\r\n")
        except UnicodeDecodeError:
            # The error holds the bytes of the file, so it must not become the context of the ConfigError.
            problem = "not UTF-8 text"
        except OSError as error:
            problem = (error.strerror or type(error).__name__).lower()
        raise ConfigError(f"secret `{self._reference}`: {problem}")

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._reference == other._reference

    def __hash__(self) -> int:
        return hash(self._reference)

    @classmethod
    def _validate(cls, value: Any, info: core_schema.ValidationInfo) -> "Secret":
        if isinstance(value, Secret):
            return value
        if isinstance(value, str):
            try:
                return cls(value, base_of(info))
            except ConfigError:
                pass
        raise expected("a secret as `${ENV}` or `file:PATH`")

    def _dump(self, info: core_schema.SerializationInfo) -> str:
        return self._reference if (info.context or {}).get(REFERENCES) else MASK

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(cls._dump, info_arg=True)
        return core_schema.with_info_plain_validator_function(cls._validate, serialization=dump)

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"type": "string", "pattern": _PATTERN}
