"""Message bodies: decode them as a type, encode them as JSON, and describe why a type rejects one."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, get_args, get_type_hints

import msgspec

from keywise.core.errors import SettingsError

FAULTS_SHOWN = 5


def decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes bytes as the type: a pydantic model, or any type that msgspec supports."""
    if is_model(kind):
        return model_decoder(kind)
    try:
        return msgspec.json.Decoder(kind).decode
    except (TypeError, NameError) as error:
        raise SettingsError(
            f"bodies cannot be read as {kind!r}: {error}; use a msgspec.Struct, a model or dict"
        ) from error


def first_parameter_type(function: Callable[..., Any]) -> Any:
    """Return the annotation of the function's first parameter; Any if it has none."""
    return parameter_types(function)[0][1]


def parameter_types(function: Callable[..., Any]) -> list[tuple[inspect.Parameter, Any]]:
    """Return the parameters of a function, at least one, each with its annotation; Any if it has none."""
    plain = function.func if isinstance(function, functools.partial) else function
    annotated = plain if inspect.isroutine(plain) else type(plain).__call__
    try:
        parameters = list(inspect.signature(function).parameters.values())
        hints = get_type_hints(annotated)
    except (NameError, TypeError, ValueError) as error:
        raise SettingsError(
            f"the parameters of {function!r} cannot be read: {error}; annotate them with types that its module defines "
            "or imports"
        ) from error
    if not parameters:
        raise SettingsError(f"{function!r} takes no parameter; give it one, for the message")
    return [(parameter, hints.get(parameter.name, Any)) for parameter in parameters]


def is_model(kind: Any) -> bool:
    """Whether a type is or contains a pydantic model or dataclass, as in `list[Page]` or `Page | None`."""
    return any(_fields(part) is not None for part in _parts(kind))


def model_decoder(kind: Any) -> Callable[[bytes], Any]:
    """Return a function that decodes bytes as a pydantic type; it raises `msgspec.ValidationError` as msgspec does."""
    # pydantic is optional: a user who passes a model has it installed.
    import pydantic

    try:
        validate = pydantic.TypeAdapter(kind).validate_json
    except (pydantic.errors.PydanticUserError, TypeError, NameError) as error:
        cause = str(error).partition("\n")[0]
        raise SettingsError(f"bodies cannot be read as {kind!r}: {cause}") from error
    names = frozenset(_field_names(kind, set()))

    def decode(body: bytes) -> Any:
        try:
            return validate(body)
        except pydantic.ValidationError as error:
            cause = _format_faults(error, names)
        except Exception as error:
            cause = type(error).__name__
        # Raised outside of the except blocks, without pydantic's error or its text: both quote the body,
        # which may hold personal data, and the cause ends in logs and dead letters.
        raise msgspec.ValidationError(f"{_name(kind)} refuses {cause}")

    return decode


def encoded(body: Any) -> bytes:
    """Encode a body for a source: bytes as they are, any other value as JSON."""
    return body if isinstance(body, bytes) else msgspec.json.encode(body, enc_hook=_dumped)


def _dumped(value: Any) -> Any:
    if not hasattr(value, "model_dump"):
        raise TypeError(f"Encoding objects of type {type(value).__name__} is unsupported")
    return value.model_dump(mode="json", by_alias=True)


def _format_faults(error: Any, names: frozenset[str]) -> str:
    """List the invalid fields, each with pydantic's error type."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [f"{_place(fault['loc'], names)} ({fault['type']})" for fault in faults[:FAULTS_SHOWN]]
    more = len(faults) - len(texts)
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _place(path: tuple[int | str, ...], names: frozenset[str]) -> str:
    """Format the path of a field. A name that is not one of the model's comes from the body and is masked."""
    return ".".join(str(part) if isinstance(part, int) or part in names else "…" for part in path) or "body"


def _field_names(kind: Any, seen: set[int]) -> Iterator[str]:
    """Yield the names and aliases of all fields of the type and of the models nested in it."""
    for part in _parts(kind):
        if id(part) in seen:
            continue
        seen.add(id(part))
        for name, field in (_fields(part) or {}).items():
            yield from (one for one in (name, field.alias, field.validation_alias) if isinstance(one, str))
            yield from _field_names(field.annotation, seen)


def _fields(kind: Any) -> Any:
    return getattr(kind, "__pydantic_fields__", None) if isinstance(kind, type) else None


def _parts(kind: Any) -> Iterator[Any]:
    yield kind
    for part in get_args(kind):
        yield from _parts(part)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", str(kind))
