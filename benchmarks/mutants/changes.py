"""What can be changed in a module: operators, limits, conditions, and calls made for their effect."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.And: ast.Or,
    ast.Or: ast.And,
}
_SWAPPED_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "minimum": "maximum", "maximum": "minimum"}
_LOGS = {"debug", "info"}


@dataclass(frozen=True, kw_only=True)
class Change:
    """One change of one module."""

    line: int
    before: str
    after: str
    source: str
    """The whole module with the change."""


def changes(source: str) -> Iterator[Change]:
    r"""All changes of a module, in the order of its text.

    Left alone: docstrings, annotations, decorators, messages (what is raised, f-strings, log lines) and imports.

    >>> [change.after for change in changes("def f(x):\n    return x < 3\n")]
    ['x <= 3', '4']
    """
    starts = [0]
    encoded = source.encode()
    for line in encoded.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node, new in _visit(ast.parse(source)):
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin, end = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
        text = ast.unparse(new)
        spliced = f"({text})" if isinstance(new, ast.expr) else text
        changed = (encoded[:begin] + spliced.encode() + encoded[end:]).decode()
        before = ast.unparse(node)
        yield Change(line=node.lineno, before=before, after=text, source=changed)


def _visit(node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    for changed in _of_node(node):
        yield node, changed
    if _is_for_types(node):
        return
    if isinstance(node, ast.If | ast.While) and isinstance(node.test, ast.Name | ast.Attribute | ast.Call):
        yield node.test, ast.UnaryOp(op=ast.Not(), operand=node.test)  # other tests change by their own operators
    for child in _inside(node):
        yield from _visit(child)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.Import | ast.ImportFrom) or _is_for_types(node):
        return
    left_alone = {"annotation", "returns", "decorator_list", "type_comment", "bases"}
    for name, value in ast.iter_fields(node):
        if name in left_alone or isinstance(value, ast.expr_context):
            continue
        for child in cast(list[object], value if isinstance(value, list) else [value]):
            if isinstance(child, ast.AST) and not _is_log(child):
                yield child


def _of_node(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=[op]) if type(op) in _SWAPPED:
            yield _with(node, ops=[_SWAPPED[type(op)]()])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) | ast.AugAssign(op=op) if type(op) in _SWAPPED:
            yield _with(node, op=_SWAPPED[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(value=not value)
        case ast.Constant(value=int(value)):
            yield ast.Constant(value=value + 1)
        case ast.Constant(value=float(value)):
            yield ast.Constant(value=2 * value + 1)
        case ast.Name(id=name, ctx=ast.Load()) if name in _SWAPPED_NAMES:
            yield ast.Name(id=_SWAPPED_NAMES[name])
        case ast.Attribute(attr=name) if name in _SWAPPED_NAMES:
            yield _with(node, attr=_SWAPPED_NAMES[name])
        case ast.IfExp(body=body, orelse=other):
            yield _with(node, body=other, orelse=body)
        case ast.Expr(value=ast.Call() | ast.Await()) | ast.Continue() | ast.Break():
            yield ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield ast.Pass()
        case _:
            pass


def _with(node: ast.AST, **fields: object) -> ast.AST:
    made = copy.copy(node)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}


def _is_log(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in _LOGS
    )
