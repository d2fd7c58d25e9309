"""Errors of requests, in the format of RFC 9457."""

from __future__ import annotations

from collections.abc import Iterable
from http import HTTPStatus

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import to_json

from qflow_client.broker.core.errors import AmqpError, ReplyCode

__all__ = ["FieldProblem", "Problem", "ProblemDetails", "from_amqp", "from_validation", "problem_response"]

MEDIA_TYPE = "application/problem+json"

_STATUS_OF = {
    ReplyCode.ACCESS_REFUSED: HTTPStatus.FORBIDDEN,
    ReplyCode.NOT_FOUND: HTTPStatus.NOT_FOUND,
    ReplyCode.RESOURCE_LOCKED: HTTPStatus.CONFLICT,
    ReplyCode.PRECONDITION_FAILED: HTTPStatus.CONFLICT,
}


class FieldProblem(BaseModel):
    """A wrong field of the request."""

    model_config = ConfigDict(extra="forbid")

    field: str = Field(
        description="Place of the field, such as `arguments` or `queues[3].name`; empty for the whole body."
    )
    detail: str = Field(description="What is wrong with the field.")


class ProblemDetails(BaseModel):
    """An error, in the format of RFC 9457."""

    model_config = ConfigDict(extra="forbid")

    title: str = Field(description="Text of the HTTP status.")
    status: int = Field(description="HTTP status code.")
    detail: str = Field(description="What went wrong, and how to correct it.")
    errors: list[FieldProblem] = Field(description="Wrong fields of the request; empty if no field is wrong.")


class Problem(Exception):
    """Ends a request with an error.

    Args:
        detail: text that says what went wrong, and how to correct the request.
        errors: for each wrong field, the place of the field and a description of the error.
        retry_after: value of the header ``Retry-After`` in seconds; ``None`` for no such header.
    """

    def __init__(
        self, status: int, detail: str, errors: Iterable[tuple[str, str]] = (), *, retry_after: int | None = None
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.errors = tuple(errors)
        self.retry_after = retry_after


def from_amqp(error: AmqpError) -> Problem:
    """Convert an AMQP error of the broker to a `Problem`."""
    return Problem(_STATUS_OF.get(error.code, HTTPStatus.BAD_REQUEST), error.text)


def from_validation(error: ValidationError, where: str = "") -> Problem:
    """Convert an error of pydantic to a `Problem` that lists the invalid fields.

    Args:
        where: place of the validated value in the body, such as ``queues[3]``; empty for the whole body.
    """
    errors = []
    for each in error.errors(include_url=False, include_context=False, include_input=False):
        path = where
        for step in each["loc"]:
            path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
        errors.append((path, each["msg"]))
    detail = "; ".join(f"{path}: {text}" if path else text for path, text in errors)
    return Problem(HTTPStatus.BAD_REQUEST, detail, errors)


def problem_response(problem: Problem) -> web.Response:
    """Return the response for a problem."""
    told = ProblemDetails(
        title=HTTPStatus(problem.status).phrase,
        status=problem.status,
        detail=problem.detail,
        errors=[FieldProblem(field=field, detail=detail) for field, detail in problem.errors],
    )
    headers = {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
    return web.Response(status=problem.status, body=to_json(told), content_type=MEDIA_TYPE, headers=headers)
