"""The `data` section: which lines are read, and which slots, dense values and labels a sample is made of."""

import difflib
import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationInfo,
    field_serializer,
    field_validator,
    model_validator,
)

from elasticrec.config.fields import (
    Bytes,
    Paths,
    Pooling,
    Section,
    SomePaths,
    Word,
    expected,
    one_or_list,
    problem,
)

CRITEO_SLOTS = tuple(f"C{i}" for i in range(1, 27))
CRITEO_DENSE = tuple(f"I{i}" for i in range(1, 14))
MAX_SLOTS = 65535

_RANGE = re.compile(r"([0-9]+)-([0-9]+)")
_NUMBER = re.compile(r"0|[1-9][0-9]*")


def _named(value: Any) -> Any:
    """An item that is only a name stands for the mapping with that name."""
    return {"name": value} if isinstance(value, str | int) and not isinstance(value, bool) else value


def _range_of(name: str) -> range | None:
    match = _RANGE.fullmatch(name)
    return range(int(match[1]), int(match[2]) + 1) if match else None


class Slot(Section):
    """One slot; in a job file the name may also be a range such as `0-25`, which becomes one slot each."""

    name: Word = Field(description="Name of the slot, or a range of numbered slots such as `0-25`.")
    pooling: Pooling | None = Field(
        default=None,
        description="How several signs of one sample become one vector; `data.pooling` if not given.",
    )
    share: Word | None = Field(
        default=None, description="Slot whose rows it shares: equal values of the two slots have one row."
    )
    sequence: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Not pooled: its last so many signs reach the model one by one, in their order.",
    )

    @field_validator("name", "share", mode="before")
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
            raise expected(f"a range that goes up and has at most {MAX_SLOTS} slots")
        return value


class DenseColumn(Section):
    """One dense value of a sample; its normalisation is fixed here and never fitted from the stream."""

    name: Word = Field(description="Name of the column.")
    normalize: Literal["log", "none", "minmax"] = Field(
        default="log",
        description="`log`: sign(x) · log(1 + |x|); `minmax`: `min`..`max` to 0..1; `none`: as it is.",
    )
    min: float | None = Field(default=None, description="Value that `minmax` maps to 0.")
    max: float | None = Field(default=None, description="Value that `minmax` maps to 1.")

    @model_validator(mode="after")
    def _check_bounds(self) -> Self:
        if self.normalize != "minmax":
            if self.min is not None or self.max is not None:
                raise problem(f"`min` and `max` belong to normalize `minmax`, not `{self.normalize}`")
        elif self.min is None or self.max is None:
            raise problem("normalize `minmax` needs `min` and `max`")
        elif not self.min < self.max:
            raise problem(f"expected `min` below `max`, got {self.min} and {self.max}")
        return self

    def normalization(self) -> dict[str, Any]:
        """The normalisation as the parser in Rust reads it."""
        if self.normalize == "minmax":
            return {"kind": "minmax", "min": self.min, "max": self.max}
        return {"kind": self.normalize}


_Slots = Annotated[
    tuple[Annotated[Slot, BeforeValidator(_named, json_schema_input_type=str | int | Slot)], ...],
    Field(strict=False),
    BeforeValidator(one_or_list, json_schema_input_type=str | int | list[str | int | Slot]),
]
_Columns = Annotated[
    tuple[Annotated[DenseColumn, BeforeValidator(_named, json_schema_input_type=str | DenseColumn)], ...],
    Field(strict=False),
]


class Data(Section):
    """What is read and how a line becomes a sample. `slots` depends on `format` and `pooling` before it."""

    format: Literal["slots", "criteo"] = Field(
        description="`slots`: lines of `show click sign:slot ...`; `criteo`: label, 13 numbers and "
        "26 categories, separated by tabs."
    )
    train: SomePaths = Field(
        description="Files to train on: paths, globs or directories, relative to the job file; "
        "each file is read once an epoch however many of them match it."
    )
    eval: Paths = Field(default=(), description="Files to evaluate on, given like `train`.")
    pooling: Pooling = Field(default="sum", description="Pooling of the slots that do not name their own.")
    slots: _Slots = Field(
        default=(),
        validate_default=True,
        description="Slots to use: names, numbers, ranges such as `0-25`, or mappings of name and "
        "pooling. Required for format `slots`; C1 to C26 for `criteo`.",
    )
    labels: Annotated[tuple[Word, ...], Field(min_length=1, strict=False)] = Field(
        default=("click",), description="Names of the labels in the order of the line."
    )
    dense: _Columns = Field(
        default=(),
        validate_default=True,
        description="Dense values to use: names or mappings of name and normalisation. I1 to I13 with "
        "`log` for `criteo`; format `slots` has none.",
    )
    unit_bytes: Bytes = Field(
        default=16 * 2**20,
        description="Size of a unit, the piece of a file that is read, leased and replayed as one.",
    )
    shuffle: bool = Field(default=True, description="Permute units, and samples inside a unit, by seed and epoch.")
    workers: int = Field(default=1, ge=1, le=1024, description="Threads that read and parse.")
    max_bad_ratio: float = Field(
        default=0.001, ge=0, le=1, description="Share of lines that may be malformed before the job fails."
    )

    @field_validator("slots", mode="before")
    @classmethod
    def _default_slots(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or value == ():
            return [] if info.data.get("format") == "slots" else list(CRITEO_SLOTS)
        return value

    @field_validator("slots")
    @classmethod
    def _complete_slots(cls, value: tuple[Slot, ...], info: ValidationInfo) -> tuple[Slot, ...]:
        default = info.data.get("pooling")
        num_slots = sum(len(_range_of(slot.name) or [slot.name]) for slot in value)
        if num_slots == 0:
            raise problem("expected at least 1 slot, got none; name those to use, such as `[0-25]`")
        if num_slots > MAX_SLOTS:
            raise problem(f"expected at most {MAX_SLOTS} slots, got {num_slots}")
        slots = tuple(
            slot.model_copy(update={"name": name, "pooling": slot.pooling or default})
            for slot in value
            for name in _expand(slot.name)
        )
        _check_sharing(slots)
        _check_columns([slot.name for slot in slots], "slot", info, CRITEO_SLOTS)
        return slots

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        _check_unique(value, "label")
        if info.data.get("format") == "criteo" and len(value) != 1:
            raise problem(f"expected exactly 1 label for format `criteo`, got {len(value)}")
        return value

    @field_validator("dense", mode="before")
    @classmethod
    def _default_dense(cls, value: Any, info: ValidationInfo) -> Any:
        if value is None or value == ():
            return list(CRITEO_DENSE) if info.data.get("format") == "criteo" else []
        return value

    @field_validator("dense")
    @classmethod
    def _check_dense(cls, value: tuple[DenseColumn, ...], info: ValidationInfo) -> tuple[DenseColumn, ...]:
        if value and info.data.get("format") == "slots":
            raise problem("format `slots` has no dense values, expected none")
        _check_columns([column.name for column in value], "column", info, CRITEO_DENSE)
        return value

    @field_serializer("slots", when_used="json")
    def _show_slots(self, slots: tuple[Slot, ...]) -> list[Any]:
        """As a person would write them: names where the default pooling holds, ranges for runs of numbers."""
        shown: list[Any] = []
        run: list[int] = []
        for slot in slots:
            plain = slot.model_dump(exclude_none=True).keys() == {"name", "pooling"} and slot.pooling == self.pooling
            if plain and _NUMBER.fullmatch(slot.name):
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
        return [column.model_dump(exclude_none=True) for column in dense]


def _expand(name: str) -> Iterable[str]:
    numbers = _range_of(name)
    return [name] if numbers is None else map(str, numbers)


def _show_run(run: list[int]) -> list[str]:
    return [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]


def _check_sharing(slots: Iterable[Slot]) -> None:
    own = {slot.name: slot.share is None for slot in slots}
    for slot in slots:
        if slot.share is not None and not own.get(slot.share):
            what = "which is not among the slots" if slot.share not in own else "which shares those of another"
            raise problem(f"slot `{slot.name}` shares the rows of `{slot.share}`, {what}")
    num_cells = sum(slot.sequence or 1 for slot in slots)
    if num_cells > MAX_SLOTS:
        raise problem(f"expected at most {MAX_SLOTS} slots and places of sequences, got {num_cells}")


def _check_unique(names: Iterable[str], kind: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise problem(f"{kind} `{name}` is given twice, expected each once")
        seen.add(name)


def _check_columns(names: list[str], kind: str, info: ValidationInfo, columns: tuple[str, ...]) -> None:
    """Names are unique and, in a Criteo row, are those of its columns."""
    _check_unique(names, kind)
    if info.data.get("format") != "criteo":
        return
    for name in names:
        if name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            hint = f", did you mean `{near[0]}`?" if near else ""
            raise problem(f"{kind} `{name}` is not in a criteo row, expected `{columns[0]}` to `{columns[-1]}`{hint}")
