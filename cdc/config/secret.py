"""Values that must never be shown: passwords, tokens, masking keys."""


class Secret:
    """A secret that shows only stars when it is printed, logged or formatted.

    The trap: only `reveal()` returns the value, and its result must go straight into a client call. Not a dataclass,
    because serialisers of dataclasses would write the value.
    """

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        """The secret itself."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(***)"

    def __str__(self) -> str:
        return "***"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._value == other._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __bool__(self) -> bool:
        return bool(self._value)
