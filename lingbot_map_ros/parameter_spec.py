"""What one parameter may be, and the check of a value against it."""

from __future__ import annotations

from dataclasses import dataclass

from lingbot_map.errors import UserError

Value = bool | int | float | str


class ParameterError(UserError):
    """Say in one line which parameter has which wrong value, and what would be right."""


@dataclass(frozen=True)
class Spec:
    """What one parameter may be; `low` and `high` are inclusive."""

    default: Value
    description: str
    unit: str = ''
    low: float | None = None
    high: float | None = None
    multiple_of: int = 1
    choices: tuple[str, ...] = ()
    settable: bool = False  # while the node is configured or active

    @property
    def range_text(self) -> str:
        if self.choices:
            return ' | '.join(self.choices)
        if isinstance(self.default, bool):
            return 'true | false'
        if self.low is None:
            return 'text'
        multiples = f', multiple of {self.multiple_of}' if self.multiple_of > 1 else ''
        return f'{self.low:g} .. {self.high:g}{multiples}'

    @property
    def change_rule(self) -> str:
        return 'settable while running' if self.settable else 'fixed once configured'

    def check(self, name: str, value: Value) -> Value:
        """Return `value` in the parameter's own type; raise ParameterError if it does not fit."""
        if value is False and 'off' in self.choices:
            value = 'off'  # YAML 1.1 reads an unquoted off as a truth value
        if isinstance(self.default, float) and type(value) is int:
            value = float(value)
        if not (type(value) is type(self.default) and self._allows(value)):
            wanted = type(self.default).__name__
            raise ParameterError(
                f"parameter '{name}' is {value!r}: it must be {wanted} ({self.range_text})"
            )
        return value

    def _allows(self, value: Value) -> bool:
        if self.choices:
            return value in self.choices
        if self.low is None:
            return True
        fits = self.multiple_of == 1 or value % self.multiple_of == 0
        return self.low <= value <= self.high and fits
