"""The section `serve`: which models answer, to whom, how much at a time and until when."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from elasticrec.config.fields import MAX_COUNT, Bytes, Name, Seconds, Section, Word, expected, is_loopback, problem
from elasticrec.config.publish import Addresses
from elasticrec.config.secret import Secret
from elasticrec.config.train import Tls

_Model = Annotated[str, Field(min_length=1, max_length=4096)]


class ServedVariant(Section):
    """One of several versions, or models, that share the requests of a model."""

    name: Word = Field(description="What answers call it.")
    model: _Model = Field(description="What is served, as `elasticrec serve` takes it, such as `models/ctr:17`.")
    weight: float = Field(default=1.0, ge=0, le=1e9, description="Its share, against those of the others.")


class ServedModel(Section):
    """A model that is served; a text alone is its `model`."""

    # Filled from the model's own name when it is served.
    name: Name | None = Field(default=None, description="What requests call it; the model's own name if not given.")
    model: _Model | None = Field(
        default=None, description="What is served, as `elasticrec serve` takes it: a directory, a URL, `models/ctr:17`."
    )
    variants: Annotated[tuple[ServedVariant, ...], Field(strict=False)] = Field(
        default=(), description="Instead of `model`: several that share the requests by weight."
    )
    addresses: Addresses = Field(
        default=(),
        description="With `rows: store`: the shards of this model, as `cube.addresses`, which is the default.",
    )

    @model_validator(mode="after")
    def _check_variants(self) -> "ServedModel":
        if (self.model is None) == (not self.variants):
            raise problem("expected `model` or `variants`, got " + ("neither" if self.model is None else "both"))
        if self.variants and self.name is None:
            raise problem("`name`: expected one for a model with variants, got none")
        names = [variant.name for variant in self.variants]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise problem(f"`variants`: `{twice}` is given twice, expected each once")
        if self.variants and not any(variant.weight > 0 for variant in self.variants):
            raise problem("`variants`: expected at least one with a weight above 0")
        return self


def _of_text(value: Any) -> Any:
    return {"model": value} if isinstance(value, str) else value


_Served = Annotated[ServedModel, BeforeValidator(_of_text, json_schema_input_type=str | ServedModel)]


class Serve(Section):
    """The inference server. What `host` may be depends on the keys before it."""

    insecure: bool = Field(
        default=False,
        description="Allows a host that other machines reach without TLS, and even without a token.",
    )
    token: Secret | None = Field(
        default=None, description="Token that requests must carry, as `${ENV}` or `file:PATH`; null for none."
    )
    tls: Tls = Field(default=Tls(), description="TLS of HTTP and gRPC; without files they talk in clear.")
    host: str = Field(default="127.0.0.1", validate_default=True, description="Address to listen on.")
    port: int = Field(default=8500, ge=0, le=65535, description="Port to listen on; 0 takes a free one and prints it.")
    models: Annotated[tuple[_Served, ...], Field(strict=False)] = Field(
        default=(), description="What is served where the command line names nothing; else the model of this job."
    )
    rows: Literal["held", "store"] = Field(
        default="held",
        description="Where rows are looked up: `held` in this process, or at the `store` of `cube.addresses`.",
    )
    on_lost_shard: Literal["error", "zeros"] = Field(
        default="error",
        description="With `rows: store`, while no replica of a shard answers: requests that need it get an error "
        "(503), or its rows read as zero. Both are counted.",
    )
    store_timeout_ms: int = Field(
        default=200, ge=1, le=60_000, description="With `rows: store`: how long a batch may wait for its rows."
    )
    poll_s: Seconds = Field(
        default=0.5, description="Seconds between two looks for a new version; more where each look costs."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=4096,
        description="Batches of each model that are scored at once; null for one a core, with `rows: store` four.",
    )
    readers: int = Field(
        default=0,
        ge=0,
        le=256,
        description="Processes, of each model, that run the reader of a version trained with `data.reader`, so that "
        "lines in its format are answered: code out of the model's directory. 0 runs none; named slots need none.",
    )
    reader_timeout_ms: int = Field(
        default=1000,
        ge=1,
        le=600_000,
        description="How long such a process may take for the lines of a request; it is ended and started again then.",
    )
    max_connections: int = Field(
        default=4096, ge=1, le=1048576, description="Connections at once; further ones wait to be accepted."
    )
    max_body_bytes: Bytes = Field(
        default=16 * 2**20, description="Largest request body; a larger one is answered with 413."
    )
    max_pending_bytes: Bytes = Field(
        default=2**30,
        description="Most that requests under way and their answers may have in memory together, those of up to 4 KiB "
        "not counted; what is beyond is answered with 429. At least four times `max_body_bytes`.",
    )
    max_instances: int = Field(
        default=10_000,
        ge=1,
        le=MAX_COUNT,
        description="Most instances in one request; more are answered with 413.",
    )
    queue: int = Field(
        default=1024,
        ge=1,
        le=1048576,
        description="Requests that may wait, of each model; those beyond are answered with 429.",
    )
    timeout_ms: int | None = Field(
        default=None,
        ge=1,
        le=3_600_000,
        description="Milliseconds after which a request that says nothing of it is answered with 504; null for never.",
    )
    batch_size: int = Field(
        default=256,
        ge=1,
        le=MAX_COUNT,
        description="Requests that wait together are scored together, up to so many instances; 1 scores each alone.",
    )
    batch_wait_us: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Microseconds that a request may wait for others, when others came together with those before it.",
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
                f"a loopback address such as 127.0.0.1, or {missing} too (`serve.insecure: true` does without)"
            )
        return value

    @model_validator(mode="after")
    def _check_sizes_and_models(self) -> "Serve":
        # one request has its body as it came and inflated, and its answer
        if self.max_pending_bytes < (least := 4 * self.max_body_bytes):
            told = f"expected at least four times `max_body_bytes`, {least:,}, got {self.max_pending_bytes:,}"
            raise problem(f"`max_pending_bytes`: {told}")
        names = [model.name for model in self.models if model.name is not None]
        if twice := next((name for at, name in enumerate(names) if name in names[:at]), None):
            raise problem(f"`models`: `{twice}` is given twice, expected each once")
        return self
