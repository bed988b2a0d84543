"""Options: read from signatures, bound to calls, checked, and written back.

A part is a dataclass; a model or a partition is a function. Both declare their options in the same
way, and every ``name(option=value)`` is bound to such a signature::

    @dataclass(frozen=True)
    class FedProx(Part):
        mu: Annotated[float, Doc("weight of the proximal term"), Range(0)] = 0.01

    def cosine(*, rounds: Annotated[int, Doc("length"), Range(1)], floor: Fraction = 0.0): ...

The options of a dataclass are its fields; those of a function are its keyword-only parameters.
Types are ``int``, ``float``, ``bool``, ``str``, ``Literal``, ``tuple`` and unions of them. In a
union with None and without ``str``, the word ``none`` is None. An option of another type, or
without one, takes any value.
"""

from kedge.schema.binding import (
    BoundCall,
    Configured,
    ErrorCollector,
    Option,
    OptionRow,
    Schema,
    bind_sum,
    read_fields,
    schema_of,
)
from kedge.schema.values import (
    Choice,
    Count,
    Doc,
    Length,
    NotNegative,
    Positive,
    Range,
    Read,
    Share,
    Size,
)

__all__ = [
    "BoundCall", "Choice", "Configured", "Count", "Doc", "ErrorCollector", "Length", "NotNegative",
    "Option", "OptionRow", "Positive", "Range", "Read", "Schema", "Share", "Size", "bind_sum",
    "read_fields", "schema_of",
]  # fmt: skip
