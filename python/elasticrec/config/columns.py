"""The parts of a sample: slots, dense columns, and the columns of a CSV or Parquet file that hold them."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_serializer, field_validator, model_validator

from elasticrec.config.fields import Pooling, Section, Word, expected, one_or_list, problem

MAX_SLOTS = 65535

_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


def _expand_name(value: Any) -> Any:
    """Expand a bare name to a mapping with that name."""
    return {"name": value} if isinstance(value, str | int) and not isinstance(value, bool) else value


def range_of(name: str) -> range | None:
    """Return the numbers of a range such as `0-25`, or None for any other name."""
    match = _RANGE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else None


def fold_ranges(items: Iterable[Any]) -> list[Any]:
    """Replace consecutive numbers among the names of slots by a range such as `0-25`; other items stay."""
    folded: list[Any] = []
    run: list[str] = []
    for item in (*items, None):
        is_number = isinstance(item, str) and _NUMBER.fullmatch(item)
        if run and not (is_number and int(item) == int(run[-1]) + 1):
            folded += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else run
            run = []
        if is_number:
            run.append(item)
        elif item is not None:
            folded.append(item)
    return folded


class Slot(Section):
    """One slot. In a job file the name may also be a range such as `0-25`, which stands for one slot per number."""

    name: Word = Field(description="Name of the slot, or a range of numbered slots such as `0-25`.")
    pooling: Pooling | None = Field(
        default=None,
        description="How several signs of one sample become one vector. Default: `data.pooling`.",
    )
    share: Word | None = Field(
        default=None, description="Slot to share rows with: equal values of both slots use the same row."
    )
    sequence: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Keep the last N signs as a sequence: they reach the model one by one, in order, and are not "
        "pooled.",
    )
    column: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Name of the slot or column in the data, if it differs from `name`."
    )
    separator: Annotated[str, Field(min_length=1, max_length=16)] | None = Field(
        default=None, description="CSV and Parquet: separator between several values in one field."
    )

    @field_validator("name", "share", "column", mode="before")
    @classmethod
    def _number_is_a_name(cls, value: Any) -> Any:
        if isinstance(value, int) and not isinstance(value, bool):
            if value < 0:
                raise expected("a name or a number from 0")
            return str(value)
        return value

    @field_validator("name")
    @classmethod
    def _check_range(cls, value: str) -> str:
        match = _RANGE.fullmatch(value)
        if match is None:
            return value
        if not all(_NUMBER.fullmatch(end) and len(end) <= 18 for end in match.groups()):
            raise expected("a range of numbers without leading zeros such as `0-25`")
        if not 1 <= int(match[2]) - int(match[1]) + 1 <= MAX_SLOTS:
            raise expected(f"an ascending range of at most {MAX_SLOTS} slots")
        return value


class Buckets(Section):
    """Dense column of a bucket slot, and the number of buckets per 1.0 of its normalised value."""

    dense: str
    steps: int


class BucketSlot(Slot):
    """A slot derived from a dense value instead of read from the data."""

    buckets: Buckets


class DenseColumn(Section):
    """One dense value of a sample. Its normalisation is fixed here and never fitted to the data."""

    name: Word = Field(description="Name of the column.")
    normalize: Literal["log", "none", "minmax"] | None = Field(
        default=None,
        description="`log`: sign(x) · log(1 + |x|); `minmax`: maps `min`..`max` to 0..1; `none`: unchanged. Default: "
        "`none` for `paddlerec`, `log` for other formats.",
    )
    min: float | None = Field(default=None, description="Value that `minmax` maps to 0.")
    max: float | None = Field(default=None, description="Value that `minmax` maps to 1.")
    buckets: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Number of buckets per 1.0 of the normalised value. Adds a slot NAME.bucket whose sign is the "
        "number of the bucket; 0 adds no slot. Default: `data.buckets`.",
    )
    count: int | None = Field(
        default=None,
        ge=1,
        le=65535,
        description="Format `paddlerec`: how often the name repeats in a line; its values become NAME.0, NAME.1 and "
        "so on.",
    )
    column: Annotated[str, Field(min_length=1)] | None = Field(
        default=None, description="Name of the column in the data, if it differs from `name`."
    )

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.normalize != "minmax":
            if self.min is not None or self.max is not None:
                raise problem(f"`min` and `max` belong to normalize `minmax`, not `{self.normalize or 'log'}`")
        elif self.min is None or self.max is None:
            raise problem("normalize `minmax` needs `min` and `max`")
        elif not self.min < self.max:
            raise problem(f"expected `min` below `max`, got {self.min} and {self.max}")
        return self

    def feature(self) -> dict[str, Any]:
        """Return the column as the Rust parser expects it."""
        normalize: dict[str, Any] = {"kind": self.normalize}
        if self.normalize == "minmax":
            normalize |= {"min": self.min, "max": self.max}
        column = {} if self.column is None else {"column": self.column}
        return {"name": self.name, "normalize": normalize, **column}


Slots = Annotated[
    tuple[Annotated[Slot, BeforeValidator(_expand_name, json_schema_input_type=str | int | Slot)], ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | int | list[str | int | Slot]),
]
DenseColumns = Annotated[
    tuple[Annotated[DenseColumn, BeforeValidator(_expand_name, json_schema_input_type=str | DenseColumn)], ...],
    Field(strict=False),
]


Texts = Annotated[
    tuple[str, ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
]


class Columns(Section):
    """The role of each column of a CSV or Parquet file."""

    labels: Annotated[
        tuple[Word, ...],
        Field(strict=False, min_length=1),
        BeforeValidator(one_or_list, json_schema_input_type=str | list[str]),
    ] = Field(description="Columns of the labels, the click first. Values: 0, 1 or a fraction between them.")
    sparse: Slots = Field(
        description="Columns of categories, each a slot: names, or mappings of name, `separator`, `sequence`, `share`, "
        "`pooling` and `column`. A value is hashed with its slot; a list in Parquet is several values."
    )
    dense: DenseColumns = Field(default=(), description="Columns of numbers: names, or mappings with a normalisation.")
    weight: str | None = Field(
        default=None, description="Column with the weight of a sample; without it every sample has weight 1."
    )
    time: str | None = Field(
        default=None, description="Column with the time of a sample: seconds since 1970, or a date and time."
    )
    null: Texts = Field(default=(), description="Texts that mean a missing value, in addition to empty text.")
    names: Texts = Field(
        default=(),
        description="CSV: names of the columns in the order of a line. Default: the header of the first file.",
    )
    header: bool = Field(default=True, description="CSV: the first line of a file holds the column names.")
    delimiter: Annotated[str, Field(min_length=1, max_length=1)] = Field(
        default=",", description="CSV: character between two fields."
    )

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        if not self.header and not self.names:
            raise problem("`header: false` needs `names`")
        if not self.delimiter.isascii() or self.delimiter in '"\r\n':
            raise problem(f"delimiter: expected one ASCII character, got `{self.delimiter!r}`")
        check_unique(self.names, "column")
        return self

    @field_serializer("sparse", "dense", when_used="json")
    def _show(self, items: tuple[Slot | DenseColumn, ...]) -> list[Any]:
        shown = (item.model_dump(exclude_none=True) for item in items)
        return [item["name"] if item.keys() == {"name"} else item for item in shown]


def expand(name: str) -> Iterable[str]:
    """Return the slot names that a name or a range stands for."""
    numbers = range_of(name)
    return [name] if numbers is None else map(str, numbers)


def check_unique(names: Iterable[str], kind: str) -> None:
    """Raise an error for a name that appears twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise problem(f"{kind} `{name}` is given twice, expected each once")
        seen.add(name)


def check_sharing(slots: tuple[Slot, ...]) -> None:
    """Check that shared slots exist and do not share rows themselves, and that there are not too many cells."""
    own = {slot.name: slot.share is None for slot in slots}
    for slot in slots:
        if slot.share is not None and not own.get(slot.share):
            what = (
                "which is not a slot of this job"
                if slot.share not in own
                else "which itself shares the rows of another slot"
            )
            raise problem(f"slot `{slot.name}` shares the rows of `{slot.share}`, {what}")
    num_cells = sum(slot.sequence or 1 for slot in slots)
    if num_cells > MAX_SLOTS:
        raise problem(f"expected at most {MAX_SLOTS} slots and sequence positions, got {num_cells}")
