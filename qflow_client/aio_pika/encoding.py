"""Encodes the header frame of a message to the same bytes as pamqp, but faster."""

from __future__ import annotations

from operator import attrgetter
from random import getrandbits
from struct import Struct
from typing import Any

import pamqp.encode
import pamqp.frame
from aiormq import spec
from pamqp.header import ContentHeader

__all__ = ["header_frame", "make_message_id"]

_Properties = spec.Basic.Properties
# Returns the values of all properties, in the order in which AMQP encodes them.
_values = attrgetter(*_Properties.__slots__)
# The flag and pamqp's encoder of each property, in the order of `_values`.
_KINDS = tuple(
    (_Properties.flags[name], pamqp.encode.METHODS[_Properties.amqp_type(name)]) for name in _Properties.__slots__
)
_HEAD = Struct(">BHIHHQH")
_BASIC = 60
# Size in bytes of a header frame's payload without the values of the properties.
_EMPTY_PAYLOAD = 14

# The fixed bits of a random UUID (RFC 9562, section 5.4): the version 4 and the variant.
_RANDOM_BITS = ~(0xF000 << 64 | 0xC000 << 48)
_FIXED_BITS = 0x4000 << 64 | 0x8000 << 48


def header_frame(properties: Any, body_size: int, channel: int) -> bytes:
    """Return the header frame of a message as pamqp encodes it, or raise the same errors as pamqp.

    pamqp looks up the encoder of each property by name. This function calls the encoders directly, in a third of the
    time.
    """
    if type(properties) is _Properties:
        flags, pieces = 0, []
        try:
            for at, value in enumerate(_values(properties)):
                if value is not None and value != "":
                    flag, encode = _KINDS[at]
                    flags |= flag
                    pieces.append(encode(value))
        except Exception:
            # Encode with pamqp below, which raises the error that users of aio-pika know.
            pass
        else:
            values = b"".join(pieces)
            return _HEAD.pack(2, channel, _EMPTY_PAYLOAD + len(values), _BASIC, 0, body_size, flags) + values + b"\xce"
    return pamqp.frame.marshal(ContentHeader(properties=properties, body_size=body_size), channel)


def make_message_id() -> str:
    """Return a message id like those of aiormq: the hexadecimal digits of a random UUID."""
    return f"{getrandbits(128) & _RANDOM_BITS | _FIXED_BITS:032x}"
