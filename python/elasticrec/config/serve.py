"""The section `serve`: the models to serve, the addresses to listen on, and the limits."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from elasticrec.config.fields import MAX_COUNT, Bytes, Name, Seconds, Section, Word, expected, is_loopback, problem
from elasticrec.config.publish import Addresses
from elasticrec.config.secret import Secret
from elasticrec.config.train import Tls

_Model = Annotated[str, Field(min_length=1, max_length=4096)]


class ServedVariant(Section):
    """One of several models or versions that share the requests for one name."""

    name: Word = Field(description="Name of the variant in responses.")
    model: _Model = Field(description="Model to serve, as for `elasticrec serve`, such as `models/ctr:17`.")
    weight: float = Field(
        default=1.0,
        ge=0,
        le=1e9,
        description="Weight of the variant; its share of the requests is its weight divided by the sum of all.",
    )


class ServedModel(Section):
    """A model to serve. A plain string is short for a mapping with only `model`."""

    # Filled from the model's own name when it is served.
    name: Name | None = Field(
        default=None, description="Name of the model in requests. Default: its name in the repository."
    )
    model: _Model | None = Field(
        default=None,
        description="Model to serve, as for `elasticrec serve`: a directory, a URL or `models/ctr:17`.",
    )
    variants: Annotated[tuple[ServedVariant, ...], Field(strict=False)] = Field(
        default=(), description="Instead of `model`: several variants that share the requests by weight."
    )
    addresses: Addresses = Field(
        default=(),
        description="With `rows: store`: addresses of the shards of this model. Default: `cube.addresses`.",
    )

    @model_validator(mode="after")
    def _check_variants(self) -> "ServedModel":
        if (self.model is None) == (not self.variants):
            raise problem("expected `model` or `variants`, got " + ("neither" if self.model is None else "both"))
        if self.variants and self.name is None:
            raise problem("`name`: a model with variants needs a name")
        names = [variant.name for variant in self.variants]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise problem(f"`variants`: `{twice}` is given twice, expected each once")
        if self.variants and not any(variant.weight > 0 for variant in self.variants):
            raise problem("`variants`: expected at least one with a weight above 0")
        return self


def _expand_text(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


_Served = Annotated[ServedModel, BeforeValidator(_expand_text, json_schema_input_type=str | ServedModel)]


class Serve(Section):
    """The prediction server: its models, address and limits."""

    # The order of the fields matters: the check of `host` looks at the fields above it.
    insecure: bool = Field(
        default=False,
        description="Without TLS or without a token, allow a host that other machines can reach.",
    )
    token: Secret | None = Field(
        default=None, description="Token that requests must carry, as `${ENV}` or `file:PATH`; null for none."
    )
    tls: Tls = Field(default=Tls(), description="TLS of HTTP and gRPC; unencrypted if no files are given.")
    host: str = Field(default="127.0.0.1", validate_default=True, description="Address to listen on.")
    port: int = Field(default=8500, ge=0, le=65535, description="Port to listen on; 0 picks a free port and prints it.")
    models: Annotated[tuple[_Served, ...], Field(strict=False)] = Field(
        default=(), description="Models to serve if the command line names none. Default: the model of this job."
    )
    rows: Literal["held", "store"] = Field(
        default="held",
        description="Where rows are looked up: `held`, in the memory of the server, or `store`, in the online store at "
        "`cube.addresses`.",
    )
    on_lost_shard: Literal["error", "zeros"] = Field(
        default="error",
        description="With `rows: store`, while no replica of a shard answers: requests that need the shard fail with "
        "503 (`error`), or its rows read as zero (`zeros`). Both are counted.",
    )
    store_timeout_ms: int = Field(
        default=200, ge=1, le=60_000, description="With `rows: store`: timeout for the rows of a batch."
    )
    poll_s: Seconds = Field(
        default=0.5, description="Seconds between two checks for a new version. Use more where each check costs money."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Batches that are scored at the same time, for each model; null for one per core, four per core "
        "with `rows: store`.",
    )
    readers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes, for each model, that run the reader of a version trained with `data.reader`, so that "
        "requests may contain lines in its format. This runs code from the directory of the model. 0 runs none; "
        "requests with named slots need none.",
    )
    reader_timeout_ms: int = Field(
        default=1000,
        ge=1,
        le=600_000,
        description="Timeout of a reader process for the lines of one request; a process that exceeds it is restarted.",
    )
    max_connections: int = Field(
        default=4096,
        ge=1,
        le=1048576,
        description="Maximum number of connections; further connections wait to be accepted.",
    )
    max_body_bytes: Bytes = Field(
        default=16 * 2**20, description="Maximum size of a request body; a larger body is answered with 413."
    )
    max_pending_bytes: Bytes = Field(
        default=2**30,
        description="Maximum memory of all in-flight requests and responses; further requests are answered with 429. "
        "Requests of up to 4 KiB do not count. At least four times `max_body_bytes`.",
    )
    max_instances: int = Field(
        default=10_000,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of instances in one request; more are answered with 413.",
    )
    queue: int = Field(
        default=1024,
        ge=1,
        le=1048576,
        description="Maximum number of queued requests, for each model; further requests are answered with 429.",
    )
    timeout_ms: int | None = Field(
        default=None,
        ge=1,
        le=3_600_000,
        description="Time limit in milliseconds for requests that set none; late requests are answered with 504. Null "
        "for no limit.",
    )
    batch_size: int = Field(
        default=256,
        ge=1,
        le=MAX_COUNT,
        description="Maximum number of instances scored together from queued requests; 1 scores each request alone.",
    )
    batch_wait_us: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Microseconds that a request may wait for others to be scored with it, if recent requests "
        "arrived together.",
    )

    @field_validator("host")
    @classmethod
    def _check_host(cls, value: str, info: ValidationInfo) -> str:
        if not value or not value.isprintable() or any(c in value for c in " /@"):
            raise expected("an address or a host name")
        given = info.data
        if is_loopback(value) or given.get("insecure", True):
            return value
        has_tls = "tls" in given and given["tls"].cert is not None
        missing = " and ".join(
            name for name, has in (("`token`", given.get("token")), ("`tls.cert`", has_tls)) if not has
        )
        if missing:
            raise expected(
                f"a loopback address such as 127.0.0.1 (other hosts need {missing}, or `serve.insecure: true`)"
            )
        return value

    @model_validator(mode="after")
    def _check_sizes_and_models(self) -> "Serve":
        # One request holds its body as received, the decompressed body, and its response.
        if self.max_pending_bytes < (least := 4 * self.max_body_bytes):
            raise problem(
                f"`max_pending_bytes`: expected at least four times `max_body_bytes`, {least:,}, "
                f"got {self.max_pending_bytes:,}"
            )
        names = [model.name for model in self.models if model.name is not None]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise problem(f"`models`: `{twice}` is given twice, expected each once")
        return self
