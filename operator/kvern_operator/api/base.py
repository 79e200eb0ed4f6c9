"""What the models of the resource are built from: the base model, its rules, and Kubernetes' own scalar types.

A rule stands once, as a CEL expression and a Python predicate side by side: the API server evaluates the first, the
loader the second. This file knows nothing of InferenceService itself.
"""

import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PlainSerializer, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import PydanticCustomError

from kvern_operator.api.patterns import DNS_SUBDOMAIN, FRACTION_PATTERN, PERCENT_PATTERN, QUANTITY_PATTERN

MAX_INT32 = 2**31 - 1


class Rule(NamedTuple):
    """A rule over fields of one object. `field` (camelCase, dotted) is to blame; `shows` are printed with it.

    The API server also tries a rule on the default of its object, which is {}: ask has() for fields with defaults.
    """

    field: str
    cel: str
    message: str
    holds: Callable[[Any], bool]
    shows: tuple[str, ...] = ()


class KvernModel(BaseModel):
    """A part of the resource: camelCase outside, snake_case inside, unknown fields and lax types refused, immutable."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        serialize_by_alias=True,
        protected_namespaces=(),
        use_attribute_docstrings=False,
    )
    RULES: ClassVar[tuple[Rule, ...]] = ()
    # Rules that need the old object: the API server checks them, and `immutable_changes` does for local files.
    TRANSITION_RULES: ClassVar[tuple[tuple[str, str, str], ...]] = ()

    @model_validator(mode="after")
    def _rules_hold(self) -> "KvernModel":
        broken = []
        for rule in self.RULES:
            if not rule.holds(self):
                values = {name: _plain(_look_up(self, name)) for name in rule.shows}
                broken.append({"field": rule.field, "message": rule.message, "values": values})
        if broken:
            text = "; ".join(str(b["message"]) for b in broken)
            raise PydanticCustomError("rule", "{text}", {"text": text, "problems": broken})
        return self

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values with camelCase names, without what is unset."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


def _look_up(model: BaseModel, dotted: str) -> Any:
    value: Any = model
    for part in dotted.split("."):
        names = {(info.alias or name): name for name, info in type(value).model_fields.items()}
        value = getattr(value, names[part])
        if not isinstance(value, BaseModel):
            break
    return value


def _plain(value: Any) -> Any:
    return value.to_dict() if isinstance(value, KvernModel) else value


def field(default: Any = ..., description: str = "", **constraints: Any) -> Any:
    """A pydantic field with the description that `kubectl explain` prints. `extra` goes into the schema as it is."""
    extra = constraints.pop("extra", None)
    return Field(default, description=description, json_schema_extra=extra, **constraints)


def nested(model: type[BaseModel], description: str) -> Any:
    """A field whose default is the model with its own defaults (`default: {}` in the schema)."""
    return Field(default_factory=model, description=description, json_schema_extra={"default": {}})


# ---------------------------------------------------------------- scalars

Text = Annotated[str, Field(min_length=1, max_length=1024)]
ShortText = Annotated[str, Field(min_length=1, max_length=253)]
ObjectName = Annotated[str, Field(min_length=1, max_length=253, pattern=DNS_SUBDOMAIN)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]
Positive = Annotated[int, Field(ge=1, le=MAX_INT32)]
Seconds = Annotated[int, Field(ge=0, le=86_400)]

Fraction = Annotated[str, Field(max_length=6, pattern=FRACTION_PATTERN)]

_FACTORS: dict[str, Decimal] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** (i + 1) for i, suffix in enumerate("kMGTPE")},
    **{f"{suffix}i": Decimal(1024) ** (i + 1) for i, suffix in enumerate("KMGTPE")},
}


def _quoted(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def parse_quantity(value: str | int) -> Decimal:
    """A Kubernetes quantity ("500m", "4Gi", 2) in base units. Raises ValueError where it is none."""
    match = re.fullmatch(QUANTITY_PATTERN, str(value))
    if match is None or (isinstance(value, int) and value < 0):
        raise ValueError(
            f"{_quoted(value)} is not a quantity; write a number and a unit, such as 500m, 2, 512Mi or 4Gi"
        )
    number, suffix = match.group(1), match.group(3) or ""
    return Decimal(number) * _FACTORS[suffix]


def _check_quantity(value: str | int) -> str | int:
    try:
        parse_quantity(value)
    except ValueError as error:
        raise PydanticCustomError("quantity", "{text}", {"text": str(error)}) from None
    return value


_INT_OR_STRING: dict[str, Any] = {
    "x-kubernetes-int-or-string": True,
    "anyOf": [{"type": "integer"}, {"type": "string"}],
    "minimum": 0,
    "maxLength": 32,
}

Quantity = Annotated[
    Annotated[str, Field(max_length=32)] | int,
    AfterValidator(_check_quantity),
    WithJsonSchema({**_INT_OR_STRING, "pattern": QUANTITY_PATTERN}),
]


def _check_int_or_percent(value: str | int) -> str | int:
    if isinstance(value, str) and re.fullmatch(PERCENT_PATTERN, value):
        return value
    if isinstance(value, int) and 0 <= value <= MAX_INT32:
        return value
    text = f'{_quoted(value)} is neither a count nor a percentage; write 1 or "25%"'
    raise PydanticCustomError("int_or_percent", "{text}", {"text": text})


IntOrPercent = Annotated[
    str | int,
    AfterValidator(_check_int_or_percent),
    WithJsonSchema({**_INT_OR_STRING, "maximum": MAX_INT32, "pattern": PERCENT_PATTERN}),
]


def is_zero(value: str | int) -> bool:
    """True for 0 and "0%"."""
    return value in (0, "0%")


def resolve_count(value: str | int, total: int, *, round_up: bool) -> int:
    """An int-or-percent as a count of `total`, rounded as Deployments do (surge up, unavailable down)."""
    if isinstance(value, int):
        return value
    share = total * int(value.removesuffix("%"))
    return -(-share // 100) if round_up else share // 100


def parse_time(value: Any) -> datetime:
    """RFC 3339 text or an aware datetime, in UTC with whole seconds."""
    if isinstance(value, str):
        value = datetime.fromisoformat(value.replace("Z", "+00:00"))
    if not isinstance(value, datetime) or value.tzinfo is None:
        raise ValueError(f"{value!r} is not a time; write RFC 3339, such as 2026-01-31T12:00:00Z")
    return value.astimezone(UTC).replace(microsecond=0)


def format_time(value: datetime) -> str:
    """RFC 3339 in UTC with whole seconds, as the API server writes times."""
    return value.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


Time = Annotated[
    datetime,
    Field(strict=False),
    AfterValidator(parse_time),
    PlainSerializer(format_time, return_type=str),
    WithJsonSchema({"type": "string", "format": "date-time", "maxLength": 64}),
]
