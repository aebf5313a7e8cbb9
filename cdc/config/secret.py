"""Values that must never be shown: passwords, tokens, masking keys."""


class Secret:
    """Holds a secret so that printing, logging or formatting it shows only stars.

    The trap: `reveal()` is the one way out, and its result must go straight into a client call. Not a dataclass:
    whoever serialises those would serialise the secret.
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
