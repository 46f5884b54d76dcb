"""Items of DynamoDB: JSON as attributes and back, the conditions of a write, and what a refused condition means."""

import base64
from collections.abc import Callable, Mapping
from decimal import Context, Decimal, Inexact, InvalidOperation
from typing import Any, TypeAlias

import msgspec

from keywise.core.change import VERSION_MIN, Change, Outcome
from keywise.core.entry import Claim
from keywise.core.sink import APPLIED, SUPERSEDED, SinkResult

Item: TypeAlias = dict[str, Any]
"""Attributes by name, each as a mapping from its type to its value."""

DIGITS_MAX = 38
EXPONENT_MIN, EXPONENT_MAX = -130, 125
"""What a number of DynamoDB can hold: so many digits, and a first digit between these powers of ten."""
INTEGER_DIGITS = 18
"""Longer integers are written as decimals, because some JSON readers have no integers of more than 64 bits."""

_read_object = msgspec.json.Decoder(dict[str, Any], float_hook=Decimal).decode
_write_object = msgspec.json.Encoder(decimal_format="number").encode
_EXACT = Context(prec=DIGITS_MAX, traps=[Inexact, InvalidOperation])


# JSON and attributes.


def attributes_of(body: bytes) -> Item:
    """Return a JSON object as attributes, with all digits of its numbers; raises ValueError if that is impossible."""
    try:
        fields = _read_object(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ValueError(f"the body is no JSON object: {error}") from error
    return {name: _attribute(name, value) for name, value in fields.items()}


def row_of(item: Mapping[str, Any]) -> bytes:
    """Return an item as a JSON object, with all digits of its numbers."""
    return _write_object({name: _value(attribute, _as_written) for name, attribute in sorted(item.items())})


def fields_of(item: Mapping[str, Any]) -> dict[str, Any]:
    """Return an item as JSON values as they are usually decoded: a number with a fraction is a float."""
    return {name: _value(attribute, _as_decoded) for name, attribute in item.items()}


def number(value: int) -> dict[str, str]:
    return {"N": str(value)}


def whole_number(attribute: Mapping[str, Any] | None) -> int | None:
    """Return the number of an attribute; None if it is not a whole one."""
    if attribute is None or "N" not in attribute:
        return None
    value = Decimal(attribute["N"])
    return int(value) if value == value.to_integral_value() else None


def _attribute(name: str, value: Any) -> dict[str, Any]:
    match value:
        case None:
            return {"NULL": True}
        case bool():
            return {"BOOL": value}
        case str():
            return {"S": value}
        case int() | Decimal():
            return {"N": _number_text(name, value)}
        case list():
            return {"L": [_attribute(name, one) for one in value]}
        case _:
            return {"M": {part: _attribute(f"{name}.{part}", one) for part, one in value.items()}}


def _number_text(name: str, value: int | Decimal) -> str:
    try:
        # Without trailing zeros, the number of digits is the one that DynamoDB counts.
        exact = _EXACT.normalize(Decimal(value))
    except (Inexact, InvalidOperation):
        exact = None
    if exact is None or (exact and not EXPONENT_MIN <= exact.adjusted() <= EXPONENT_MAX):
        raise ValueError(
            f"{name} is a number that DynamoDB cannot hold ({DIGITS_MAX} digits, from 1E{EXPONENT_MIN} to "
            f"9.9E{EXPONENT_MAX}); send it as text"
        )
    return str(exact) if exact else "0"


def _value(attribute: Mapping[str, Any], read_number: Callable[[str], Any]) -> Any:
    [(kind, held)] = attribute.items()
    match kind:
        case "NULL":
            return None
        case "N":
            return read_number(held)
        case "L":
            return [_value(one, read_number) for one in held]
        case "M":
            return {name: _value(one, read_number) for name, one in held.items()}
        case "SS":
            return sorted(held)
        case "NS":
            return [read_number(one) for one in sorted(held, key=Decimal)]
        case "B":
            return _text(held)
        case "BS":
            return sorted(map(_text, held))
        case _:
            return held


def _text(held: bytes) -> str:
    return base64.b64encode(held).decode()


def _as_written(text: str) -> int | Decimal:
    value = Decimal(text)
    is_short = value == value.to_integral_value() and value.adjusted() < INTEGER_DIGITS
    return int(value) if is_short else value


def _as_decoded(text: str) -> int | float:
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else float(value)


# Conditions.


class AttributeNames(msgspec.Struct, frozen=True, kw_only=True):
    """The names of the attributes that keywise adds to an item; all others are fields of the body."""

    version: str
    generation: str = ""
    """Empty: items have no generation, and versions alone are compared."""
    tombstone: str


class ConditionalPut(msgspec.Struct, frozen=True):
    """An item to put, and the condition under which the table accepts it."""

    item: Item
    deleted: bool
    version: int
    generation: int
    condition: str
    names: dict[str, str]
    values: dict[str, Any]


def is_removal(change: Change[Any]) -> bool:
    """Whether an operator or a repair removes a key whose version is unknown."""
    return change.deleted and change.order[1] == VERSION_MIN


def write_of(change: Change[Any], claim: Claim, key: str, names: AttributeNames) -> ConditionalPut | SinkResult:
    """Return the item of a change with its condition, or why it can never be written. `key` is the key's attribute."""
    # A message has no era; the claim has the era of the key.
    era, version, generation = claim.order or change.order
    if era > 0:
        return permanent(
            f"the key is in era {era}, and an item has a version without an era; send the new numbering to a fresh "
            "table, as a pipeline with a new name"
        )
    try:
        item = {} if change.deleted else attributes_of(change.body)
    except ValueError as error:
        return permanent(str(error))
    if names.tombstone in item:
        return permanent(f"the body has a field {names.tombstone}, which marks deletions; name another with tombstone=")
    generation = max(0, generation)
    item |= {key: {"S": change.key}, names.version: number(version)}
    if names.generation:
        item[names.generation] = number(generation)
    if change.deleted:
        item[names.tombstone] = {"BOOL": True}
    # A repair (its claim has no order) writes again at the version that the table has.
    condition, used = _condition(names, generation, is_repeat=claim.order is None)
    values = {":version": number(version)} | ({":generation": number(generation)} if "#generation" in used else {})
    return ConditionalPut(item, change.deleted, version, generation, condition, used, values)


def _condition(names: AttributeNames, generation: int, *, is_repeat: bool) -> tuple[str, dict[str, str]]:
    """Return the condition that accepts a newer order, and an equal version if it is a repeat, with the names it uses.

    Attributes have other names in it, because theirs may be reserved words.
    """
    used = {"#version": names.version}
    if is_repeat or (generation > 0 and not names.generation):
        # A repair writes below a forced write of the same version that was never committed. Without generations, a
        # reindex and an operator also write again at the version that is there.
        return "attribute_not_exists(#version) OR #version <= :version", used
    newer = "attribute_not_exists(#version) OR #version < :version"
    if generation == 0:
        return newer, used
    same = "attribute_not_exists(#generation) OR #generation < :generation"
    return f"{newer} OR (#version = :version AND ({same}))", used | {"#generation": names.generation}


class HeldItem(msgspec.Struct, frozen=True):
    """What the table holds of a key, without the body."""

    version: int | None
    """None if the attribute is missing, or no whole number."""
    generation: int
    is_tombstone: bool


def held_of(item: Mapping[str, Any], names: AttributeNames) -> HeldItem:
    generation = whole_number(item.get(names.generation)) if names.generation else None
    return HeldItem(whole_number(item.get(names.version)), generation or 0, is_tombstone(item, names.tombstone))


def is_tombstone(item: Mapping[str, Any], name: str) -> bool:
    return item.get(name) == {"BOOL": True}


def result_of_refusal(write: ConditionalPut, held: HeldItem | None, names: AttributeNames) -> SinkResult:
    """Return what a refused condition means, given what the table held then (None: no item)."""
    if held is None:
        return SinkResult(Outcome.BUSY, "the table refused the condition, and holds no item; it is asked again")
    if held.version is None:
        return permanent(f"the item has no whole number in {names.version}, so versions cannot be compared")
    generation = write.generation if names.generation else 0
    there, ours = (held.version, held.generation), (write.version, generation)
    if there < ours:
        return SinkResult(Outcome.BUSY, "the table refused the condition, and holds an older item; it is asked again")
    # Equal: an earlier attempt was applied, and its answer was lost.
    return APPLIED if there == ours and held.is_tombstone == write.deleted else SUPERSEDED


def permanent(cause: str) -> SinkResult:
    return SinkResult(Outcome.FAILED, cause, permanent=True)
