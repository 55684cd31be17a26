"""The `data` section: which samples are read, how a line becomes one, and which are kept for evaluation."""

import difflib
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_serializer,
    model_validator,
)

from elasticrec.config.columns import (
    MAX_SLOTS,
    NUMBER,
    Buckets,
    BucketSlot,
    Columns,
    DenseColumn,
    DenseColumns,
    Slot,
    Slots,
    check_sharing,
    check_unique,
    expand,
    range_of,
)
from elasticrec.config.fields import (
    Bytes,
    Paths,
    Pooling,
    Section,
    SomePaths,
    Word,
    base_of,
    expected,
    one_or_list,
    problem,
)
from elasticrec.config.hours import Hours

CRITEO_SLOTS = tuple(f"C{i}" for i in range(1, 27))
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))

# Formats whose columns are described by `data.columns`.
TABLES = ("csv", "parquet")

Select = tuple[Literal["ratio", "time"], float, bool]


class Holdout(Section):
    """Samples of the training data that are kept for evaluation."""

    ratio: float | None = Field(default=None, gt=0, lt=1, description="A share of all samples, chosen by their hash.")
    time: str | None = Field(
        default=None,
        description="Samples from this time on, such as `2026-01-31` or `2026-01-31T18:00`, UTC without an offset: "
        "by `data.columns.time`, or by files in directories YYYYMMDD/HH.",
    )

    @field_validator("time")
    @classmethod
    def _check_time(cls, value: str | None) -> str | None:
        if value is not None:
            seconds_of(value)
        return value

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if (self.ratio is None) == (self.time is None):
            raise problem("expected one of `ratio` and `time`")
        return self


# What `data.eval` is given as; a tag in angle brackets is left out of messages.
_Eval = Annotated[
    Annotated[Paths, Tag("<files>")] | Annotated[Holdout, Tag("<part>")],
    Discriminator(lambda value: "<part>" if isinstance(value, dict | Holdout) else "<files>"),
]


def seconds_of(text: str) -> float:
    """Seconds since 1970 of a date and time; UTC unless it has an offset."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise expected("a date and time such as `2026-01-31T18:00`") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class Data(Section):
    """What is read and how a line becomes a sample. What a field means depends on those before it."""

    format: Literal["slots", "paddlerec", "criteo", "csv", "parquet", "reader"] = Field(
        description="`slots`: lines of `show click sign:slot ...`; `paddlerec`: lines of "
        "`click:0 dense_feature:0.05 ... slot:value ...`; `criteo`: label, 13 numbers and 26 categories, separated by "
        "tabs; `csv` and `parquet`: see `columns`; `reader`: see `reader`. Text may be plain, gzip or zstd."
    )
    reader: str | None = Field(
        default=None,
        validate_default=True,
        description="Format `reader`: your own class that turns a line into named values, as `path/file.py:Class`.",
    )
    train: SomePaths = Field(
        description="Files to train on: paths, globs or directories, relative to the job file; "
        "each file is read once an epoch however many of them match it."
    )
    hours: Hours | None = Field(
        default=None,
        description="Data that comes hour by hour: `train` is then the directory with `YYYYMMDD/HH` in it, and each "
        "hour a pass.",
    )
    on_missing: Literal["fail", "skip"] = Field(
        default="fail",
        description="What happens when a file is gone, or is another one, before all of it was read: the training "
        "ends, or goes on without the units that are lost, which are named.",
    )
    eval: _Eval = Field(
        default=(), description="Files to evaluate on, given like `train`; or a part of those of `train`."
    )
    pooling: Pooling = Field(default="sum", description="Pooling of the slots that do not name their own.")
    columns: Columns | None = Field(
        default=None, validate_default=True, description="Formats `csv` and `parquet`: which column is what."
    )
    slots: Slots = Field(
        default=(),
        validate_default=True,
        description="Slots to use: names, numbers, ranges such as `0-25`, or mappings of name and `pooling`, `share`, "
        "`sequence`, `column`. C1 to C26 for `criteo`; not for `csv` and `parquet`.",
    )
    slot_conf: str | None = Field(
        default=None, description="A file with the slots to use, one a line, each with a name behind it if it has one."
    )
    labels: Annotated[
        tuple[Word, ...],
        Field(min_length=1, strict=False),
        BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
    ] = Field(default=("click",), validate_default=True, description="Names of the labels in the order of the line.")
    buckets: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Buckets of the dense columns that do not name their own, see `dense[].buckets`; 6 are good for "
        "counts and `log`.",
    )
    dense: DenseColumns = Field(
        default=(),
        validate_default=True,
        description="Dense values to use: names or mappings of name and normalisation. I1 to I13 with "
        "`log` for `criteo`; format `slots` has none; not for `csv` and `parquet`.",
    )
    modulo: int | None = Field(
        default=None, ge=1, le=2**64 - 1, description="Take every sign modulo this, for tables of bounded size."
    )
    padding: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)] | None = (
        Field(default=None, description="Sign, or value of a slot, that only fills a place and is left out.")
    )
    separate_slots: bool = Field(
        default=False,
        description="Format `slots`: hash a sign with its slot: equal signs of two slots have rows of their own; "
        "in the other formats they always do.",
    )
    negative_rate: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Share of the samples without a click that the data was left with; scores are for all of them.",
    )
    unit_bytes: Bytes = Field(
        default=16 * 2**20,
        description="Size of a unit, the piece of a file that is read, leased and replayed as one.",
    )
    shuffle: bool = Field(default=True, description="Permute units, and samples inside a unit, by seed and epoch.")
    workers: int = Field(
        default=1, ge=1, le=1024, description="Threads that read and parse; for `reader` processes that run it."
    )
    max_bad_ratio: float = Field(
        default=0.001, ge=0, le=1, description="Share of lines that may be malformed before the job fails."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, dict):
            return value
        if value.get("reader") is not None and "format" not in value:
            value = {"format": "reader", **value}
        path = value.get("slot_conf")
        if isinstance(path, str) and path:
            if value.get("slots"):
                raise problem("expected `slots` or `slot_conf`, got both")
            slots = read_slot_conf(base_of(info) / Path(path).expanduser())
            value = {**value, "slots": slots, "slot_conf": None}
        return value

    @field_validator("reader")
    @classmethod
    def _check_reader(cls, value: str | None, info: ValidationInfo) -> str | None:
        if info.data.get("format") != "reader":
            if value is not None:
                raise problem(f"belongs to format `reader`, not `{info.data.get('format')}`")
            return None
        if value is None:
            raise problem("format `reader` needs a class of yours, such as `reader.py:MyReader`")
        path, colon, name = value.rpartition(":")
        if not colon or not name.isidentifier() or not path.endswith(".py"):
            raise expected("a file and a class in it such as `reader.py:MyReader`")
        return f"{base_of(info) / Path(path).expanduser()}:{name}"

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, value: Columns | None, info: ValidationInfo) -> Columns | None:
        format = info.data.get("format")
        if format in TABLES and value is None:
            raise problem(f"format `{format}` needs `columns`, such as `{{labels: click, sparse: [user, item]}}`")
        if value is not None and format is not None and format not in TABLES:
            raise problem(f"belongs to formats `csv` and `parquet`, not `{format}`")
        return value

    @field_validator("slots", "dense", "labels", mode="before")
    @classmethod
    def _from_columns(cls, value: Any, info: ValidationInfo) -> Any:
        columns: Columns | None = info.data.get("columns")
        is_given = value is not None and value != cls.model_fields[str(info.field_name)].default
        if columns is not None:
            if is_given:
                raise problem("belongs into `data.columns`")
            return getattr(columns, "sparse" if info.field_name == "slots" else str(info.field_name))
        if is_given or info.field_name == "labels":
            return value
        format = info.data.get("format")
        if info.field_name == "dense":
            return CRITEO_DENSE if format == "criteo" else ()
        # a wrong format, or wrong columns, are a problem of their own: any slots do
        is_known = info.data.keys() >= {"format", "columns"}
        return () if is_known and format != "criteo" else CRITEO_SLOTS

    @field_validator("slots")
    @classmethod
    def _complete_slots(cls, value: tuple[Slot, ...], info: ValidationInfo) -> tuple[Slot, ...]:
        default = info.data.get("pooling")
        num_slots = sum(len(range_of(slot.name) or [slot.name]) for slot in value)
        if num_slots == 0:
            raise problem("expected at least 1 slot, got none; name those to use, such as `[0-25]`")
        if num_slots > MAX_SLOTS:
            raise problem(f"expected at most {MAX_SLOTS} slots, got {num_slots}")
        slots = tuple(
            slot.model_copy(update={"name": name, "pooling": slot.pooling or default})
            for slot in value
            for name in expand(slot.name)
        )
        _check_names([slot.name for slot in slots], "slot", info, CRITEO_SLOTS)
        check_unique([slot.column or slot.name for slot in slots], "slot")
        check_sharing(slots)
        if info.data.get("format") not in TABLES and any(slot.separator for slot in slots):
            raise problem("`separator` belongs to formats `csv` and `parquet`")
        return slots

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        check_unique(value, "label")
        if info.data.get("format") == "criteo" and len(value) != 1:
            raise problem(f"expected exactly 1 label for format `criteo`, got {len(value)}")
        return value

    @field_validator("dense")
    @classmethod
    def _complete_dense(cls, value: tuple[DenseColumn, ...], info: ValidationInfo) -> tuple[DenseColumn, ...]:
        format = info.data.get("format")
        if value and format == "slots":
            raise problem("format `slots` has no dense values, expected none")
        if format != "paddlerec" and any(column.count for column in value):
            raise problem("`count` belongs to format `paddlerec`")
        default = "none" if format == "paddlerec" else "log"
        buckets = info.data.get("buckets", 0)

        def complete(column: DenseColumn, name: str) -> DenseColumn:
            given = buckets if column.buckets is None else column.buckets
            settled = {"name": name, "count": None, "normalize": column.normalize or default, "buckets": given}
            return column.model_copy(update=settled)

        columns = tuple(
            complete(column, name)
            for column in value
            for name in ([f"{column.name}.{i}" for i in range(column.count)] if column.count else [column.name])
        )
        _check_names([column.name for column in columns], "column", info, CRITEO_DENSE)
        slots = info.data.get("slots", ())
        inputs = (*slots, *bucket_slots(columns))
        check_unique([slot.name for slot in inputs], "slot")
        check_sharing(inputs)
        return columns

    @field_validator("padding")
    @classmethod
    def _check_padding(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None and info.data.get("format") == "slots":
            if not re.fullmatch(r"[0-9]{1,20}", value) or int(value) >= 2**64:
                raise expected("a sign from 0 to 2^64 - 1")
            return str(int(value))
        return value

    @field_validator("separate_slots")
    @classmethod
    def _check_separate(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("format") not in ("slots", None):
            raise problem("belongs to format `slots`: in the others equal values of two slots have rows of their own")
        return value

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        if self.buckets and not self.dense:
            key = "data.dense" if self.columns is None else "data.columns.dense"
            what = "format `slots` has none" if self.format == "slots" else f"expected some in `{key}`, got none"
            raise problem(f"`buckets` are made of dense columns, {what}")
        return self

    @model_validator(mode="after")
    def _check_hours(self) -> Self:
        if self.hours is None:
            return self
        if len(self.train) != 1 or any(c in self.train[0] for c in "*?["):
            raise problem("`train`: with `hours` expected one directory, that with YYYYMMDD/HH in it")
        if isinstance(self.eval, Holdout):
            raise problem("`eval`: with `hours` expected files; every pass is evaluated before it is learned from")
        return self

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """The slots that the model has: those that are read, and those of buckets behind them."""
        return (*self.slots, *bucket_slots(self.dense))

    def select(self, *, held_out: bool) -> Select | None:
        """Which samples of the files of `train` belong to training, or to evaluation if that is a part of them."""
        if not isinstance(self.eval, Holdout):
            return None
        if self.eval.ratio is not None:
            return "ratio", self.eval.ratio, held_out
        if self.eval.time is not None and self.columns is not None and self.columns.time is not None:
            return "time", seconds_of(self.eval.time), held_out
        return None

    @model_serializer(mode="wrap")
    def _without_doubles(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Slots, dense columns and labels that come from `columns` are shown there."""
        shown: dict[str, Any] = dump(self)
        left_out = {"slot_conf", *(("slots", "dense", "labels") if self.columns else ("columns",))}
        if self.format != "reader":
            left_out.add("reader")
        return {key: value for key, value in shown.items() if key not in left_out}

    @field_serializer("eval", when_used="json")
    def _show_eval(self, value: tuple[str, ...] | Holdout) -> Any:
        return value.model_dump(exclude_none=True) if isinstance(value, Holdout) else list(value)

    @field_serializer("slots", when_used="json")
    def _show_slots(self, slots: tuple[Slot, ...]) -> list[Any]:
        """As a person would write them: names where the default pooling holds, ranges for runs of numbers."""
        shown: list[Any] = []
        run: list[int] = []
        for slot in slots:
            plain = slot.model_dump(exclude_none=True).keys() == {"name", "pooling"} and slot.pooling == self.pooling
            if plain and NUMBER.fullmatch(slot.name):
                number = int(slot.name)
                if run and number != run[-1] + 1:
                    shown += _show_run(run)
                    run = []
                run.append(number)
                continue
            shown += _show_run(run)
            run = []
            shown.append(slot.name if plain else slot.model_dump(exclude_none=True))
        return shown + _show_run(run)

    @field_serializer("dense", when_used="json")
    def _show_dense(self, dense: tuple[DenseColumn, ...]) -> list[Any]:
        return [
            column.model_dump(exclude_none=True, exclude={"buckets"} if column.buckets == self.buckets else None)
            for column in dense
        ]


def bucket_slots(dense: tuple[DenseColumn, ...]) -> tuple[BucketSlot, ...]:
    """The slots that are made of dense columns."""
    return tuple(
        BucketSlot(
            name=f"{column.name}.bucket", pooling="sum", buckets=Buckets(dense=column.name, steps=column.buckets)
        )
        for column in dense
        if column.buckets
    )


def read_slot_conf(path: Path) -> list[Any]:
    """The slots of a `slot.conf`: one a line, with a name of its own behind it if it has one; `#` begins a comment."""
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except FileNotFoundError:
        raise problem(f"slot_conf: {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise problem(f"slot_conf: {path}: cannot be read: {error}") from None
    slots: list[Any] = []
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            raise problem(f"slot_conf: {path}:{number}: expected a slot and at most a name, got {len(words)} words")
        if words:
            slots.append(words[0] if len(words) == 1 else {"name": words[1], "column": words[0]})
    if not slots:
        raise problem(f"slot_conf: {path}: expected at least 1 slot, got none")
    return slots


def _show_run(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]


def _check_names(names: list[str], kind: str, info: ValidationInfo, columns: tuple[str, ...]) -> None:
    """Names are unique and, in a Criteo row, are those of its columns."""
    check_unique(names, kind)
    if info.data.get("format") != "criteo":
        return
    for name in names:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f", did you mean `{near[0]}`?" if near else ""
            raise problem(f"{kind} `{name}` is not in a criteo row, expected `{columns[0]}` to `{columns[-1]}`{hint}")
