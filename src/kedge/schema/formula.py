"""Arithmetic formulas in text, such as ``2 * P + C if momentum else P``."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any


def evaluate(formula: str, names: Mapping[str, Any]) -> float:
    """The value of a formula of numbers, names, + - * / and conditional expressions.

    >>> evaluate("2 * P + C", {"P": 10, "C": 3})
    23
    """
    return _evaluate(ast.parse(formula, mode="eval").body, names)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def _evaluate(node: ast.expr, names: Mapping[str, Any]) -> float:
    match node:
        case ast.Constant(value=value):
            return value  # type: ignore[return-value]
        case ast.Name(id=name):
            return names[name]
        case ast.BinOp(left=left, op=op, right=right):
            return _OPERATORS[type(op)](_evaluate(left, names), _evaluate(right, names))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluate(operand, names)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _evaluate(body if _evaluate(test, names) else orelse, names)
    raise ValueError(f"a formula may hold numbers, names and + - * /, not {ast.unparse(node)!r}")
