"""How the fields of one dataclass lie in an array: compiled once from its annotations, used in both directions."""

from __future__ import annotations

import re
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from kvoffload.protocol.faults import FieldError
from kvoffload.protocol.fields import AsMany, Blob, Choice, FieldKind, Plan, Several, Since, Text, Truth, Whole

REQUIRED = MISSING
"""Stands for the default of a field that has none."""

_NO_NUMBER = 1, 0
"""Bounds between which no number lies, so that the field's kind checks every value."""


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One declared field. Its position in the array is its position in the declaration."""

    name: str
    kind: FieldKind
    help: str
    since: int
    default: Any
    count: AsMany | None

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED


class Shape:
    """Immutable; any thread may use it. Itself a field kind, so a row of a list is declared like a message.

    A reader ignores more items than it knows, and gives a missing one its default: this is what lets two versions talk.
    """

    def __init__(self, record: type[Any]) -> None:
        self.record = record
        self.fields = _read_declaration(record)
        # Most fields are whole numbers: with their ends at hand, one that is right costs no call.
        ends = [
            (kind.minimum, kind.maximum) if type(kind := field.kind) is Whole else _NO_NUMBER for field in self.fields
        ]
        self._reads = tuple((field.name, *end, field.kind.read) for field, end in zip(self.fields, ends, strict=True))
        self._lowers = tuple((field.name, *end, field.kind.lower) for field, end in zip(self.fields, ends, strict=True))
        self._required = sum(field.is_required for field in self.fields)
        self._counts = _compile_counts(self.fields)

    def read(self, value: object) -> Any:
        """Reads a tuple, as msgpack made it."""
        if type(value) is not tuple:
            raise FieldError(type(value).__name__, self.describe())
        if len(value) < self._required:
            raise FieldError(f"{len(value)} fields", f"at least {self._required}")
        found: dict[str, Any] = {}
        name = ""
        try:
            # The shorter one ends it: unknown fields of a later version, or missing ones, which have defaults.
            for (name, low, high, read), item in zip(self._reads, value, strict=False):
                found[name] = item if type(item) is int and low <= item <= high else read(item)
        except FieldError as fault:
            fault.path = f".{name}{fault.path}"
            raise
        # A frozen dataclass's own constructor takes as long as all the checks above. A default is an attribute of the
        # class, so what is not set here has it.
        record = object.__new__(self.record)
        object.__setattr__(record, "__dict__", found)
        if self._counts:
            self._check_counts(record)
        return record

    def lower(self, value: object) -> tuple[Any, ...]:
        """Does the reverse, with the same checks: nothing is sent that its reader would refuse."""
        if type(value) is not self.record:
            raise FieldError(type(value).__name__, self.describe())
        lowered = []
        name = ""
        try:
            for name, low, high, lower in self._lowers:
                item = getattr(value, name)
                lowered.append(item if type(item) is int and low <= item <= high else lower(item))
        except FieldError as fault:
            fault.path = f".{name}{fault.path}"
            raise
        if self._counts:
            self._check_counts(value)
        return tuple(lowered)

    def plan(self) -> Plan | None:
        """Returns ("shape", plan of the record), or None if a field has no plan."""
        plan = self.plan_record()
        return None if plan is None else ("shape", plan)

    def plan_record(self) -> Plan | None:
        """Returns the record, its fields with their plans, and the rules about counts, with positions for names. None:
        a field has no plan."""
        names = [field.name for field in self.fields]
        plans = tuple((field.name, field.kind.plan()) for field in self.fields)
        counts = tuple(
            (names.index(name), item_bytes, names.index(rule.of), other_item_bytes, rule.or_none, rule.or_multiple)
            for name, item_bytes, rule, other_item_bytes in self._counts
        )
        return None if any(plan is None for _, plan in plans) else (self.record, plans, counts)

    def describe(self) -> str:
        return name_of(self.record)

    def _check_counts(self, record: object) -> None:
        for name, item_bytes, rule, other_item_bytes in self._counts:
            count = len(getattr(record, name)) // item_bytes
            if not count and (rule.or_none or rule.or_multiple):
                continue
            wanted = len(getattr(record, rule.of)) // other_item_bytes
            try:
                rule.check(count, wanted)
            except FieldError as fault:
                fault.path = f".{name}"
                raise


_SHAPES: dict[type[Any], Shape] = {}


def shape_of(record: type[Any]) -> Shape:
    """Returns the shape of a record, whose annotations are read the first time only, because that takes long."""
    if record not in _SHAPES:
        _SHAPES[record] = Shape(record)
    return _SHAPES[record]


def name_of(record: type[Any]) -> str:
    """Returns the name that docs and errors use for a message or row: `acquire_entries` for AcquireEntries."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", record.__name__).lower()


def _read_declaration(record: type[Any]) -> tuple[FieldSpec, ...]:
    hints = get_type_hints(record, include_extras=True)
    found: list[FieldSpec] = []
    for field in fields(record):
        notes = getattr(hints[field.name], "__metadata__", ())
        (kind,) = (note for note in notes if isinstance(note, Whole | Truth | Text | Blob | Choice | Several | Shape))
        (text,) = (note for note in notes if isinstance(note, str))
        spec = FieldSpec(
            name=field.name,
            kind=kind,
            help=text,
            since=next((note.version for note in notes if isinstance(note, Since)), 1),
            default=field.default,
            count=next((note for note in notes if isinstance(note, AsMany)), None),
        )
        last = found[-1] if found else spec
        # Append-only: a reader of an earlier version must find its fields where they were.
        assert last.is_required or not spec.is_required, f"{record.__name__}.{spec.name} needs a default"
        assert last.since <= spec.since, f"{record.__name__}.{spec.name} is older than the field before it"
        assert spec.since == 1 or not spec.is_required, f"{record.__name__}.{spec.name} needs a default"
        if not spec.is_required:
            kind.lower(spec.default)
        found.append(spec)
    return tuple(found)


def _compile_counts(specs: tuple[FieldSpec, ...]) -> tuple[tuple[str, int, AsMany, int], ...]:
    blobs = {spec.name: spec.kind.item_bytes for spec in specs if isinstance(spec.kind, Blob)}
    return tuple(
        (spec.name, blobs[spec.name], spec.count, blobs[spec.count.of]) for spec in specs if spec.count is not None
    )
