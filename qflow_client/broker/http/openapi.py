"""Classes that define the operations of the HTTP API.

An operation is defined by the decorator `Api.operation` and by the parameters and docstring of its handler. The route,
the checks of the input, and the OpenAPI description are created from this definition.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, get_type_hints

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import from_json, to_json

from qflow_client.broker.http.problems import MEDIA_TYPE as PROBLEM
from qflow_client.broker.http.problems import Problem, ProblemDetails, from_validation
from qflow_client.broker.http.turns import Turns

__all__ = ["JSON", "Api", "MediaType", "Operation"]

JSON = "application/json"
_REFERENCE = "#/components/schemas/{model}"
_PLACEHOLDER = re.compile(r"{(\w+)}")
# Maximum number of media types that are read from the header ``Accept``. Further media types are ignored.
_MOST_WANTED = 16


class MediaType(str):
    """The media type of an answer. Handlers that can produce several media types have a parameter of this type."""

    __slots__ = ()


def _parsed(media_type: str) -> tuple[str, dict[str, str]]:
    name, *parameters = (part.strip() for part in media_type.lower().split(";"))
    return name, {key.strip(): value.strip(' "') for key, _, value in (part.partition("=") for part in parameters)}


def _quality(wanted: Iterable[tuple[str, dict[str, str]]], offered: str) -> tuple[float, int]:
    """Return weight and specificity of the most specific range in `wanted` that matches `offered` (RFC 9110, 12.5.1).

    Both numbers are 0 if the client does not accept the media type.
    """
    offered_name, offered_parameters = _parsed(offered)
    ranges = {"*/*": 1, offered_name.partition("/")[0] + "/*": 2, offered_name: 3}
    found, quality = 0, 0.0
    for name, parameters in wanted:
        specificity = ranges.get(name, 0)
        if specificity == 3 and "version" in parameters:
            specificity = 4 if parameters["version"] == offered_parameters.get("version") else 0
        if specificity > found:
            try:
                weight = float(parameters.get("q", 1.0))
            except ValueError:
                continue
            if 0 <= weight <= 1:
                found, quality = specificity, weight
    return quality, found if quality else 0


@dataclass(frozen=True)
class Operation:
    """A path and a method of the API, and the handler that serves them.

    Attributes:
        path: path of the operation, with the names of parameters in braces.
        tag: group of the operation in the OpenAPI description.
        handler: function or coroutine function that performs the operation. Its first argument is the broker. A
            parameter whose name is in `path` gets its value from the path of the request. The parameter `body` gets the
            body. A parameter of the type `Turns` gets the `Turns` of the server. A parameter of the type `MediaType`
            gets the media type of the answer. Any other parameter gets its value from the query.
        answer: type of the answer; ``None`` for an answer without a body.
        media_types: media types of the answer. The first one is the default.
        statuses: statuses of successful answers. If there are several, the handler returns the status and the answer.
        problems: statuses of errors, in addition to 400, 403, and those of `body`, `lasts`, `is_large` and `is_public`.
        is_public: whether the operation needs no token, even if the API has one.
        lasts: whether the answer waits until the changes are on disk. If the disk is too slow, the status is 503.
        is_large: whether the answer grows with the number of objects in the broker. Large answers are created one after
            the other. If a large answer needs more bytes than the server may send now, the status is 503.
        parameters: model that checks the parameters of the path and the query.
        body: adapter that checks the body; ``None`` for no body.
        takes: type of the body; ``None`` for no body.
        turns: names of the parameters with the type `Turns`.
        typed: names of the parameters with the type `MediaType`.
    """

    method: str
    path: str
    tag: str
    handler: Callable[..., Any]
    answer: Any
    media_types: tuple[str, ...]
    statuses: tuple[int, ...]
    problems: tuple[int, ...]
    is_public: bool
    lasts: bool
    is_large: bool
    parameters: type[BaseModel]
    body: TypeAdapter[Any] | None
    takes: Any
    turns: tuple[str, ...]
    typed: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def in_path(self) -> frozenset[str]:
        return frozenset(_PLACEHOLDER.findall(self.path))

    def media_type(self, accept: str) -> str:
        """Return the media type that the header ``Accept`` prefers, or the first media type if it prefers none."""
        if len(self.media_types) == 1:
            return self.media_types[0]
        wanted = [_parsed(each) for each in accept.split(",", _MOST_WANTED)[:_MOST_WANTED]]
        return max(self.media_types, key=lambda offered: _quality(wanted, offered))

    def check_parameters(self, path: dict[str, str], query: Iterable[tuple[str, str]]) -> dict[str, Any]:
        """Return the checked parameters of a request. Raise `Problem` 400 if any is wrong, unknown or repeated."""
        given = dict(path)
        for name, value in query:
            if name in given:
                raise Problem(HTTPStatus.BAD_REQUEST, f"{name} is given twice; give it once", [(name, "given twice")])
            given[name] = value
        try:
            checked = self.parameters.model_validate(given)
        except ValidationError as error:
            raise from_validation(error) from error
        return {name: getattr(checked, name) for name in self.parameters.model_fields}

    def check_body(self, content_type: str, raw: bytes) -> Any:
        """Return the checked body of a request. Raise `Problem` 415 if its type is not JSON, 400 if it is invalid."""
        assert self.body is not None
        self.check_content_type(content_type)
        try:
            # By default pydantic accepts infinity and NaN, which JSON does not have.
            from_json(raw, allow_inf_nan=False)
            return self.body.validate_json(raw, strict=True)
        except ValidationError as error:
            raise from_validation(error) from error
        except ValueError as error:
            text = f"the body is not valid JSON: {error}"
            raise Problem(HTTPStatus.BAD_REQUEST, text, [("", text)]) from error

    @staticmethod
    def check_content_type(content_type: str) -> None:
        """Raise `Problem` 415 if the content type of a body is not JSON."""
        if content_type != JSON:
            raise Problem(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"the content type must be {JSON}, not {content_type!r}")


class Api:
    """The operations of the API, and their OpenAPI description."""

    def __init__(self) -> None:
        #: The operations, in the order of their definition.
        self.operations: list[Operation] = []
        # The OpenAPI descriptions as JSON, created at the first request. The key is True for an API with a token.
        self._descriptions: dict[bool, bytes] = {}

    def operation(
        self,
        method: str,
        path: str,
        tag: str,
        *,
        answer: Any = None,
        each: type[BaseModel] | None = None,
        media_types: Sequence[str] = (JSON,),
        statuses: Sequence[int] = (),
        problems: Sequence[int] = (),
        is_public: bool = False,
        lasts: bool = False,
        is_large: bool = False,
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds an operation with the decorated handler; see `Operation`.

        If the answer is a list, `each` is the type of the list's elements. A list is always large (`is_large`).
        """
        is_large = is_large or each is not None
        if each is not None:
            answer = types.GenericAlias(list, (each,))

        def define(handler: Callable[..., Any]) -> Callable[..., Any]:
            hints = get_type_hints(handler, include_extras=True)
            parameters: dict[str, Any] = {}
            body = None
            turns: list[str] = []
            typed: list[str] = []
            for name, parameter in list(inspect.signature(handler).parameters.items())[1:]:
                if hints[name] is Turns:
                    turns.append(name)
                elif hints[name] is MediaType:
                    typed.append(name)
                elif name == "body":
                    body = TypeAdapter(hints[name])
                else:
                    default = ... if parameter.default is parameter.empty else parameter.default
                    parameters[name] = (hints[name], default)
            self.operations.append(
                Operation(
                    method=method,
                    path=path,
                    tag=tag,
                    handler=handler,
                    answer=answer,
                    media_types=tuple(media_types),
                    statuses=tuple(statuses) or ((HTTPStatus.NO_CONTENT,) if answer is None else (HTTPStatus.OK,)),
                    problems=tuple(problems),
                    is_public=is_public,
                    lasts=lasts,
                    is_large=is_large,
                    parameters=create_model(handler.__name__, __config__=ConfigDict(extra="forbid"), **parameters),
                    body=body,
                    takes=hints.get("body"),
                    turns=tuple(turns),
                    typed=tuple(typed),
                )
            )
            return handler

        return define

    def description_json(self, *, has_token: bool) -> bytes:
        """Return the OpenAPI description as JSON.

        Each description is created only once, because this takes long, and clients without the token can request it.
        """
        if has_token not in self._descriptions:
            self._descriptions[has_token] = to_json(self.description(has_token=has_token))
        return self._descriptions[has_token]

    def description(self, *, has_token: bool) -> dict[str, Any]:
        schemas, components = self._schemas()
        paths: dict[str, dict[str, Any]] = {}
        for operation in self.operations:
            paths.setdefault(operation.path, {})[operation.method.lower()] = self._describe(
                operation, schemas, has_token=has_token
            )
        told: dict[str, Any] = {"schemas": components}
        if has_token:
            told["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        return {
            "openapi": "3.1.0",
            "info": {
                "title": "qflow broker",
                "version": "1",
                "description": "Shows and controls queues, exchanges and producers of the broker.",
            },
            "paths": paths,
            "components": told,
        }

    def _schemas(self) -> tuple[dict[tuple[str, str], Any], dict[str, Any]]:
        """Return the schemas by operation and part (such as ``answer``), and the components to which they refer."""
        wanted: list[tuple[Any, Any, TypeAdapter[Any]]] = [
            ("problem", "serialization", TypeAdapter(ProblemDetails)),
        ]
        for operation in self.operations:
            wanted.append((f"{operation.name} parameters", "validation", TypeAdapter(operation.parameters)))
            if operation.body is not None:
                wanted.append((f"{operation.name} body", "validation", operation.body))
            if operation.answer is not None:
                wanted.append((f"{operation.name} answer", "serialization", TypeAdapter(operation.answer)))
        found, definitions = TypeAdapter.json_schemas(wanted, ref_template=_REFERENCE)
        components = definitions.get("$defs", {})
        schemas: dict[tuple[str, str], Any] = {}
        for (key, _mode), schema in found.items():
            name, _, of = str(key).rpartition(" ")
            if of == "parameters":
                # OpenAPI describes each parameter separately, so remove the model with all parameters.
                model = schema.get("$ref", "").rpartition("/")[2]
                schema = components.pop(model) if model else schema
            schemas[name, of] = schema
        return schemas, components

    @staticmethod
    def _describe(operation: Operation, schemas: dict[tuple[str, str], Any], *, has_token: bool) -> dict[str, Any]:
        summary, _, more = inspect.cleandoc(operation.handler.__doc__ or "").partition("\n")
        told: dict[str, Any] = {"operationId": operation.name, "tags": [operation.tag], "summary": summary}
        if more:
            told["description"] = more.strip()
        in_path = operation.in_path
        properties = schemas[operation.name, "parameters"].get("properties", {})
        if properties:
            told["parameters"] = [
                {
                    "name": name,
                    "in": "path" if name in in_path else "query",
                    "required": name in in_path or "default" not in schema,
                    "description": schema.get("description", ""),
                    "schema": {key: value for key, value in schema.items() if key not in ("title", "description")},
                }
                for name, schema in properties.items()
            ]
        problems = {*operation.problems, HTTPStatus.BAD_REQUEST, HTTPStatus.FORBIDDEN}
        if operation.body is not None:
            told["requestBody"] = {
                "required": True,
                "content": {JSON: {"schema": schemas[operation.name, "body"]}},
            }
            problems |= {
                HTTPStatus.REQUEST_TIMEOUT,
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
            }
        if operation.lasts or operation.is_large:
            problems.add(HTTPStatus.SERVICE_UNAVAILABLE)
        if has_token and not operation.is_public:
            told["security"] = [{"token": []}]
            problems.add(HTTPStatus.UNAUTHORIZED)
        responses: dict[str, Any] = {}
        for status in operation.statuses:
            responses[str(int(status))] = {"description": HTTPStatus(status).phrase}
            if operation.answer is not None:
                schema = {"schema": schemas[operation.name, "answer"]}
                responses[str(int(status))]["content"] = dict.fromkeys(operation.media_types, schema)
        for status in sorted(problems):
            responses[str(int(status))] = {
                "description": HTTPStatus(status).phrase,
                "content": {PROBLEM: {"schema": schemas["", "problem"]}},
            }
        told["responses"] = responses
        return told
