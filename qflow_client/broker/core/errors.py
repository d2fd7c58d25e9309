"""The reply codes of AMQP 0-9-1, and the exceptions that close a channel or a connection with a reply code."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AmqpError", "ChannelException", "ConnectionException", "FrameWaitsError", "ReplyCode"]


class ReplyCode(IntEnum):
    """The reply codes of AMQP 0-9-1."""

    SUCCESS = 200
    CONTENT_TOO_LARGE = 311
    NO_ROUTE = 312
    NO_CONSUMERS = 313
    CONNECTION_FORCED = 320
    INVALID_PATH = 402
    ACCESS_REFUSED = 403
    NOT_FOUND = 404
    RESOURCE_LOCKED = 405
    PRECONDITION_FAILED = 406
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    COMMAND_INVALID = 503
    CHANNEL_ERROR = 504
    UNEXPECTED_FRAME = 505
    RESOURCE_ERROR = 506
    NOT_ALLOWED = 530
    NOT_IMPLEMENTED = 540
    INTERNAL_ERROR = 541

    @property
    def title(self) -> str:
        """The name as used in reply texts, such as ``NOT_FOUND``."""
        return self.name


class AmqpError(Exception):
    """An error of a client, or of a caller of `Broker`. A client's error closes its channel or connection."""

    def __init__(self, code: ReplyCode, text: str) -> None:
        super().__init__(text)
        #: The reply code.
        self.code = code
        #: What went wrong and how to avoid it, without the code's name.
        self.text = text

    @property
    def reply_text(self) -> str:
        """The reply text of the close method: the name of the code, and `text`."""
        return f"{self.code.title} - {self.text}"


class ChannelException(AmqpError):
    """Closes the channel (reply codes 311, 313, 403 to 406, 506)."""


class ConnectionException(AmqpError):
    """Closes the connection (reply codes 320, 402, 501 to 506, 530, 540, 541)."""


class FrameWaitsError(Exception):
    """Raised if a frame, such as an ack of very many deliveries, has to be handled again before any later frame."""
