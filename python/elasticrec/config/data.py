"""The `data` section: the samples to read, how a line becomes a sample, and the samples kept for evaluation."""

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
    fold_ranges,
    range_of,
)
from elasticrec.config.fields import (
    Bytes,
    NonEmptyPaths,
    Paths,
    Pooling,
    Section,
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
COLUMN_FORMATS = ("csv", "parquet")

Select = tuple[Literal["ratio", "time"], float, bool]


class Holdout(Section):
    """The part of the training data that is kept for evaluation."""

    ratio: float | None = Field(default=None, gt=0, lt=1, description="Fraction of all samples, chosen by their hash.")
    time: str | None = Field(
        default=None,
        description="Samples from this time on, such as `2026-01-31` or `2026-01-31T18:00`; UTC unless it has an "
        "offset. The time of a sample is `data.columns.time`, or the directory YYYYMMDD/HH of its file.",
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


# `data.eval` is either files or a holdout. Messages leave out tags in angle brackets.
_Eval = Annotated[
    Annotated[Paths, Tag("<files>")] | Annotated[Holdout, Tag("<part>")],
    Discriminator(lambda value: "<part>" if isinstance(value, dict | Holdout) else "<files>"),
]


def seconds_of(text: str) -> float:
    """Return a date and time as seconds since 1970; UTC unless it has an offset."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise expected("a date and time such as `2026-01-31T18:00`") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class Data(Section):
    """The data to read, and how a line becomes a sample."""

    # The order of the fields matters: validators look at the fields above their own.
    format: Literal["slots", "paddlerec", "criteo", "csv", "parquet", "reader"] = Field(
        description="`slots`: lines of `show click sign:slot ...`; `paddlerec`: lines of "
        "`click:0 dense_feature:0.05 ... slot:value ...`; `criteo`: label, 13 numbers and 26 categories, separated by "
        "tabs; `csv` and `parquet`: see `columns`; `reader`: see `reader`. Text may be plain, gzip or zstd."
    )
    reader: str | None = Field(
        default=None,
        validate_default=True,
        description="Format `reader`: a Python class that turns a line into named values, as `path/file.py:Class`.",
    )
    train: NonEmptyPaths = Field(
        description="Files to train on: paths, globs or directories, relative to the job file. A file that several "
        "patterns match is read once per epoch."
    )
    hours: Hours | None = Field(
        default=None,
        description="Data that arrives hour by hour: `train` is then the directory that contains `YYYYMMDD/HH`, and "
        "each hour is one pass.",
    )
    on_missing: Literal["fail", "skip"] = Field(
        default="fail",
        description="When a file is deleted or replaced before it was read completely: `fail` ends the training, "
        "`skip` continues without the lost units and lists them.",
    )
    eval: _Eval = Field(
        default=(),
        description="Files to evaluate on, given like `train`; or a mapping that keeps a part of the `train` files "
        "for evaluation.",
    )
    pooling: Pooling = Field(default="sum", description="Pooling of slots that do not set their own.")
    columns: Columns | None = Field(
        default=None, validate_default=True, description="Formats `csv` and `parquet`: the role of each column."
    )
    slots: Slots = Field(
        default=(),
        validate_default=True,
        description="Slots to use: names, numbers, ranges such as `0-25`, or mappings of name and `pooling`, "
        "`share`, `sequence`, `column`. Default for `criteo`: C1 to C26. Formats `csv` and `parquet` use `columns` "
        "instead.",
    )
    slot_conf: str | None = Field(
        default=None,
        description="File that lists the slots to use, one per line, optionally followed by another name for the slot.",
    )
    labels: Annotated[
        tuple[Word, ...],
        Field(min_length=1, strict=False),
        BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
    ] = Field(default=("click",), validate_default=True, description="Names of the labels, in the order of the line.")
    buckets: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Buckets of dense columns that do not set their own, see `dense[].buckets`. For counts with `log`, "
        "start with 6.",
    )
    dense: DenseColumns = Field(
        default=(),
        validate_default=True,
        description="Dense values to use: names, or mappings of name and normalisation. Default for `criteo`: I1 to "
        "I13 with `log`. Format `slots` has none; formats `csv` and `parquet` use `columns` instead.",
    )
    modulo: int | None = Field(
        default=None,
        ge=1,
        le=2**64 - 1,
        description="Take every sign modulo this number, to bound the size of the table.",
    )
    padding: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)] | None = (
        Field(default=None, description="Sign or slot value that only pads a line; it is ignored.")
    )
    separate_slots: bool = Field(
        default=False,
        description="Format `slots`: hash a sign with its slot, so that equal signs of two slots have separate rows. "
        "The other formats always do this.",
    )
    negative_rate: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of the samples without a click that downsampling left in the data. Scores are "
        "corrected for it.",
    )
    unit_bytes: Bytes = Field(
        default=16 * 2**20,
        description="Size of a unit, the piece of a file that is read, leased and replayed as a whole.",
    )
    shuffle: bool = Field(default=True, description="Shuffle units, and samples inside a unit, by seed and epoch.")
    workers: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Threads that read and parse; with format `reader`, processes that run the reader.",
    )
    max_bad_ratio: float = Field(
        default=0.001, ge=0, le=1, description="Fraction of lines that may be malformed before the job fails."
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
            raise problem("format `reader` needs a class, such as `reader.py:MyReader`")
        path, colon, name = value.rpartition(":")
        if not colon or not name.isidentifier() or not path.endswith(".py"):
            raise expected("a file and a class in it such as `reader.py:MyReader`")
        return f"{base_of(info) / Path(path).expanduser()}:{name}"

    @field_validator("columns")
    @classmethod
    def _check_columns(cls, value: Columns | None, info: ValidationInfo) -> Columns | None:
        format = info.data.get("format")
        if format in COLUMN_FORMATS and value is None:
            raise problem(f"format `{format}` needs `columns`, such as `{{labels: click, sparse: [user, item]}}`")
        if value is not None and format is not None and format not in COLUMN_FORMATS:
            raise problem(f"belongs to formats `csv` and `parquet`, not `{format}`")
        return value

    @field_validator("slots", "dense", "labels", mode="before")
    @classmethod
    def _from_columns(cls, value: Any, info: ValidationInfo) -> Any:
        columns: Columns | None = info.data.get("columns")
        is_given = value is not None and value != cls.model_fields[str(info.field_name)].default
        if columns is not None:
            if is_given:
                raise problem("belongs in `data.columns`")
            return getattr(columns, "sparse" if info.field_name == "slots" else str(info.field_name))
        if is_given or info.field_name == "labels":
            return value
        format = info.data.get("format")
        if info.field_name == "dense":
            return CRITEO_DENSE if format == "criteo" else ()
        # An invalid format or invalid columns are reported separately; any slots avoid a second error here.
        is_known = info.data.keys() >= {"format", "columns"}
        return () if is_known and format != "criteo" else CRITEO_SLOTS

    @field_validator("slots")
    @classmethod
    def _complete_slots(cls, value: tuple[Slot, ...], info: ValidationInfo) -> tuple[Slot, ...]:
        default = info.data.get("pooling")
        num_slots = sum(len(range_of(slot.name) or [slot.name]) for slot in value)
        if num_slots == 0:
            raise problem("expected at least 1 slot, got none; list the slots to use, such as `[0-25]`")
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
        if info.data.get("format") not in COLUMN_FORMATS and any(slot.separator for slot in slots):
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
            raise problem("format `slots` has no dense values")
        if format != "paddlerec" and any(column.count for column in value):
            raise problem("`count` belongs to format `paddlerec`")
        default = "none" if format == "paddlerec" else "log"
        buckets = info.data.get("buckets", 0)

        def complete(column: DenseColumn, name: str) -> DenseColumn:
            given = buckets if column.buckets is None else column.buckets
            changes = {"name": name, "count": None, "normalize": column.normalize or default, "buckets": given}
            return column.model_copy(update=changes)

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
            raise problem(
                "belongs to format `slots`: the other formats always give equal values of two slots separate rows"
            )
        return value

    @model_validator(mode="after")
    def _check_buckets(self) -> Self:
        if self.buckets and not self.dense:
            key = "data.dense" if self.columns is None else "data.columns.dense"
            what = "format `slots` has none" if self.format == "slots" else f"expected some in `{key}`, got none"
            raise problem(f"`buckets` needs dense columns, {what}")
        return self

    @model_validator(mode="after")
    def _check_hours(self) -> Self:
        if self.hours is None:
            return self
        if len(self.train) != 1 or any(c in self.train[0] for c in "*?["):
            raise problem("`train`: with `hours` expected one directory that contains YYYYMMDD/HH")
        if isinstance(self.eval, Holdout):
            raise problem(
                "`eval`: with `hours` expected files; every pass is already evaluated before it is trained on"
            )
        return self

    @property
    def inputs(self) -> tuple[Slot, ...]:
        """The slots of the model: the slots that are read, then the bucket slots."""
        return (*self.slots, *bucket_slots(self.dense))

    def select(self, *, held_out: bool) -> Select | None:
        """Return the rule that picks the training or held-out samples of the `train` files; None for all."""
        if not isinstance(self.eval, Holdout):
            return None
        if self.eval.ratio is not None:
            return "ratio", self.eval.ratio, held_out
        if self.eval.time is not None and self.columns is not None and self.columns.time is not None:
            return "time", seconds_of(self.eval.time), held_out
        return None

    @model_serializer(mode="wrap")
    def _leave_out_duplicates(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out slots, dense columns and labels that `columns` already shows."""
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
        """Write slots the way a person would: bare names for the default pooling, ranges for consecutive numbers."""
        shown: list[Any] = []
        for slot in slots:
            keys = slot.model_dump(exclude_none=True)
            is_plain = keys.keys() == {"name", "pooling"} and slot.pooling == self.pooling
            shown.append(slot.name if is_plain else keys)
        return fold_ranges(shown)

    @field_serializer("dense", when_used="json")
    def _show_dense(self, dense: tuple[DenseColumn, ...]) -> list[Any]:
        return [
            column.model_dump(exclude_none=True, exclude={"buckets"} if column.buckets == self.buckets else None)
            for column in dense
        ]


def bucket_slots(dense: tuple[DenseColumn, ...]) -> tuple[BucketSlot, ...]:
    """Return the slots derived from dense columns."""
    return tuple(
        BucketSlot(
            name=f"{column.name}.bucket", pooling="sum", buckets=Buckets(dense=column.name, steps=column.buckets)
        )
        for column in dense
        if column.buckets
    )


def read_slot_conf(path: Path) -> list[Any]:
    """Return the slots of a `slot.conf`: one per line, optionally followed by another name; `#` starts a comment."""
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
            raise problem(f"slot_conf: {path}:{number}: expected a slot and optionally a name, got {len(words)} words")
        if words:
            slots.append(words[0] if len(words) == 1 else {"name": words[1], "column": words[0]})
    if not slots:
        raise problem(f"slot_conf: {path}: expected at least 1 slot, got none")
    return slots


def _check_names(names: list[str], kind: str, info: ValidationInfo, columns: tuple[str, ...]) -> None:
    """Check that names are unique and, for Criteo, that they are columns of its format."""
    check_unique(names, kind)
    if info.data.get("format") != "criteo":
        return
    for name in names:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f", did you mean `{near[0]}`?" if near else ""
            raise problem(
                f"{kind} `{name}` is not a column of format `criteo`, expected `{columns[0]}` to `{columns[-1]}`{hint}"
            )
