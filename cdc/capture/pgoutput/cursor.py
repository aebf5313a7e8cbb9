"""One message read field by field, for the rare kinds. Every read is checked against the bytes that are left."""

import struct

from cdc.capture.pgoutput.frames import HEAD
from cdc.errors import DecodeError
from cdc.model import Lsn

POSTGRES_EPOCH = 946_684_800_000_000
"""2000-01-01 in microseconds since 1970."""

_U32 = struct.Struct("!I")
_I32 = struct.Struct("!i")
_U64 = struct.Struct("!Q")
_I64 = struct.Struct("!q")


class MessageCursor:
    """A cursor over one message. Raises DecodeError with the offset in the frame if the message is too short."""

    def __init__(self, message: memoryview) -> None:
        self._message = bytes(message)
        self._at = 1

    def _number(self, form: struct.Struct) -> int:
        at = self._at
        self._need(form.size)
        self._at += form.size
        value: int = form.unpack_from(self._message, at)[0]
        return value

    def _need(self, size: int) -> None:
        if size > len(self._message) - self._at:
            raise DecodeError("A message ends inside a field", HEAD + len(self._message))

    def octet(self) -> int:
        """One byte."""
        self._need(1)
        self._at += 1
        return self._message[self._at - 1]

    def u16(self) -> int:
        """An unsigned 16-bit number."""
        return self.octet() << 8 | self.octet()

    def u32(self) -> int:
        """An unsigned 32-bit number: an oid or a transaction id."""
        return self._number(_U32)

    def i32(self) -> int:
        """A signed 32-bit number."""
        return self._number(_I32)

    def lsn(self) -> Lsn:
        """An LSN."""
        return Lsn(self._number(_U64))

    def time(self) -> int:
        """A timestamp, as microseconds since 1970."""
        return self._number(_I64) + POSTGRES_EPOCH

    def text(self) -> str:
        """A text that ends in a zero byte."""
        end = self._message.find(0, self._at)
        if end < 0:
            raise DecodeError("A message ends inside a name", HEAD + len(self._message))
        try:
            value = self._message[self._at : end].decode()
        except UnicodeDecodeError:
            raise DecodeError("A name is not valid UTF-8", HEAD + self._at) from None
        self._at = end + 1
        return value

    def octets(self, size: int) -> bytes:
        """That many bytes; checks first that the message has them."""
        self._need(size)
        self._at += size
        return self._message[self._at - size : self._at]

    def end(self) -> None:
        """Raise DecodeError if bytes are left."""
        if self._at != len(self._message):
            raise DecodeError("A message continues after its last field", HEAD + self._at)
