"""Values that must never be shown: passwords, tokens, masking keys."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """Holds a secret so that printing, logging or formatting it shows only stars.

    The trap: `reveal()` is the one way out, and its result must go straight into a client call.
    """

    _value: str

    def reveal(self) -> str:
        """The secret itself."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __bool__(self) -> bool:
        return bool(self._value)
