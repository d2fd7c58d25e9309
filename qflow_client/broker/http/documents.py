"""Encodes large answers as JSON and decodes large definitions documents, in slices (see `Turns`)."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from contextlib import closing
from http import HTTPStatus
from typing import Any, NoReturn

from pydantic import TypeAdapter, ValidationError
from pydantic_core import to_json

from qflow_client.broker.http.models import DefinitionsDocument
from qflow_client.broker.http.problems import Problem, from_validation
from qflow_client.broker.http.turns import Turns

__all__ = ["encode", "encoded", "read_definitions"]


def encoded(value: Any) -> bytes:
    """Return a value as JSON, without slices. If it has a method `to_json`, the result of that method is encoded."""
    told = value.to_json() if hasattr(value, "to_json") else value
    # The arguments of a queue, for example, can contain infinity and NaN. JSON has neither, so write null instead.
    return to_json(told, by_alias=True, inf_nan_mode="null")


async def encode(value: Any, turns: Turns) -> bytes | bytearray:
    """Encode a value as JSON, in slices.

    `value` is an object that `encoded` accepts, a list or iterator of such objects, or a dictionary of both kinds.
    """
    # Append the parts one by one. A join of many parts would block the event loop.
    text = bytearray()
    await _encode(value, turns, text)
    return text


async def _encode(value: Any, turns: Turns, text: bytearray) -> None:
    if isinstance(value, dict):
        text += b"{"
        for name, item in value.items():
            text += to_json(name) + b":"
            await _encode(item, turns, text)
            text += b","
        text[-1 if value else len(text) :] = b"}"
    elif isinstance(value, (list, tuple, Iterator)):
        begin = b"["
        async for item in turns.each(value):
            text += begin + encoded(item)
            begin = b","
        text += b"[]" if begin == b"[" else b"]"
    else:
        text += encoded(value)


# For each list in a definitions document, its name, and the adapter that checks its elements.
_ELEMENTS: dict[str, TypeAdapter[Any]] = {
    name: TypeAdapter(field.annotation.__args__[0])  # type: ignore[union-attr]
    for name, field in DefinitionsDocument.model_fields.items()
}
_SPACE = re.compile(r"[ \t\n\r]*")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"unexpected {what}")


_DECODER = json.JSONDecoder(parse_constant=_refuse)


async def read_definitions(raw: bytes, turns: Turns) -> DefinitionsDocument:
    """Read and check a definitions document, in slices. Raise `Problem` 400 if the document is invalid."""
    lists: dict[str, list[Any]] = {name: [] for name in _ELEMENTS}
    others: dict[str, Any] = {}
    try:
        with closing(_Reader(raw.decode()).steps(lists, others)) as steps:
            async for _ in turns.each(steps):
                pass
    except ValidationError as error:
        raise from_validation(error) from error
    except (ValueError, RecursionError) as error:
        text = f"the body is not valid JSON: {error}"
        raise Problem(HTTPStatus.BAD_REQUEST, text, [("", text)]) from error
    return DefinitionsDocument.model_construct(None, **lists, **others)


class _Reader:
    """Reads the outermost object of a JSON text. The lists in this object are read element by element."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._skip_space()

    def steps(self, lists: dict[str, list[Any]], others: dict[str, Any]) -> Generator[None, None, None]:
        """Read the document. Each step reads one list element, or one member that is not a list.

        Args:
            lists: for each list in a definitions document, its name and the Python list that gets its elements.
            others: dictionary to which the names of all other members are added as keys.

        Raises:
            Problem: 400 if an element is invalid.
            ValidationError: the text is not an object, or a member that must be a list is not a list.
            ValueError: the text is not JSON.
        """
        if self._text[:1] and self._next != "{":
            DefinitionsDocument.model_validate_json(self._text, strict=True)
        for _ in self._parts("{", "}"):
            name = self._value()
            if not isinstance(name, str):
                _refuse(f"{name!r:.60} as a name")
            self._take(":")
            if name not in lists:
                others[name] = None
            elif self._next != "[":
                DefinitionsDocument.model_validate({name: self._value()}, strict=True)
            else:
                lists[name].clear()
            yield from self._elements(name, lists.get(name))
        if self._at < len(self._text):
            _refuse(f"text after the object at character {self._at}")

    def _elements(self, name: str, found: list[Any] | None) -> Iterator[None]:
        if self._next != "[":
            self._value()
            yield
            return
        for number in self._parts("[", "]"):
            start = self._at
            self._value()
            if found is not None:
                try:
                    found.append(_ELEMENTS[name].validate_json(self._text[start : self._at], strict=True))
                except ValidationError as error:
                    raise from_validation(error, f"{name}[{number}]") from error
            yield

    @property
    def _next(self) -> str:
        return self._text[self._at : self._at + 1]

    def _parts(self, begin: str, end: str) -> Iterator[int]:
        """Yield the index of each part between brackets. The caller must read a part before it asks for the next."""
        self._take(begin)
        number = 0
        while number or self._next != end:
            yield number
            number += 1
            if self._next == end:
                break
            self._take(",")
        self._take(end)

    def _value(self) -> Any:
        value, self._at = _DECODER.raw_decode(self._text, self._at)
        self._skip_space()
        return value

    def _take(self, character: str) -> None:
        if self._next != character:
            _refuse(f"{self._next!r} in place of {character!r} at character {self._at}")
        self._at += 1
        self._skip_space()

    def _skip_space(self) -> None:
        found = _SPACE.match(self._text, self._at)
        assert found is not None
        self._at = found.end()
