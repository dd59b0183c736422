"""Small changes of a Python source, and marks that say which of its blocks a test has run.

Both come from the syntax tree. A change replaces the text of a node, so the rest
stays as it is.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

# fmt: off
_SWAPS = {
    "<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==",
    "is": "is not", "is not": "is", "in": "not in", "not in": "in",
    "+": "-", "-": "+", "*": "+", "/": "*", "//": "*", "%": "//", "and": "or", "or": "and",
}
# fmt: on
# Calls whose arguments have types that forbid to swap them; and those that only tell people.
_FIXED = {"isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "TypeVar", "field"}
_WORDS = {"warn", "warning", "debug", "info", "log", "print", "echo"}
# What is not in any block of a function is at the top of its file.
TOP = ""


@dataclass(frozen=True)
class Change:
    """Replace ``old``, which begins at a line and a column (in bytes), by ``new``."""

    path: str
    line: int
    column: int
    old: str
    new: str
    kind: str = "given"

    def apply(self, source: str) -> str:
        """The source after the change."""
        text = source.encode()
        start = _starts(text)[self.line - 1] + self.column
        end = start + len(self.old.encode())
        if text[start:end] != self.old.encode():
            raise ValueError(f"{self.path}:{self.line} does not say {self.old!r}")
        return (text[:start] + self.new.encode() + text[end:]).decode()


def _starts(text: bytes) -> list[int]:
    return [0, *(found.end() for found in re.finditer(b"\n", text))]


def changes(path: str, source: str) -> list[Change]:
    """Every small change of a source that could make it wrong."""
    return sorted(_Changes(path, source.encode()).of(ast.parse(source)), key=str)


class _Changes:
    def __init__(self, path: str, text: bytes) -> None:
        self.path, self.text, self.starts = path, text, _starts(text)

    def of(self, node: ast.AST) -> Iterator[Change]:
        yield from self._here(node)
        for child in _considered(node):
            yield from self.of(child)

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        begin = self.starts[node.lineno - 1] + node.col_offset
        return begin, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _source(self, node: ast.expr | ast.stmt) -> str:
        begin, end = self._span(node)
        return self.text[begin:end].decode()

    def _put(self, node: ast.expr | ast.stmt, new: str, kind: str) -> Change:
        return Change(self.path, node.lineno, node.col_offset, self._source(node), new, kind)

    def _operator(self, left: ast.expr, right: ast.expr, kind: str) -> Iterator[Change]:
        """Another operator between two expressions."""
        begin, end = self._span(left)[1], self._span(right)[0]
        between = self.text[begin:end].decode()
        for found in re.finditer(r"[-+*/%<>=!]+|\b(is not|not in|is|in|and|or)\b", between):
            if found[0] in _SWAPS:
                at = begin + len(between[: found.start()].encode())
                line = self.text.count(b"\n", 0, at)
                column = at - self.starts[line]
                yield Change(self.path, line + 1, column, found[0], _SWAPS[found[0]], kind)

    def _here(self, node: ast.AST) -> Iterator[Change]:
        match node:
            case ast.Compare(left=left, comparators=[right]):
                yield from self._operator(left, right, "comparison")
            case ast.BinOp(left=left, right=right) if not _is_text(left) | _is_text(right):
                yield from self._operator(left, right, "arithmetic")
            case ast.AugAssign(target=target, value=value):
                begin, end = self._span(target)[1], self._span(value)[0]
                sign = self.text[begin:end].decode()
                if sign.strip() in ("+=", "-="):
                    new = sign.translate(str.maketrans("+-", "-+"))
                    yield self._put(node, self._source(node).replace(sign, new, 1), "arithmetic")
            case ast.BoolOp(values=[left, right, *_]):
                yield from self._operator(left, right, "and/or")
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                yield self._put(node, f"({self._source(operand)})", "negation")
            case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
                yield self._put(test, f"(not ({self._source(test)}))", "negation")
            case ast.Constant(value=bool() as value):
                yield self._put(node, str(not value), "constant")
            case ast.Constant(value=int() as value):
                yield self._put(node, str(value + 1), "bound")
                yield self._put(node, f"({value - 1})", "bound")
            case ast.Slice(lower=lower, upper=upper):
                for bound in (lower, upper):
                    if bound is not None and not isinstance(bound, ast.Constant):
                        for sign in "+-":
                            yield self._put(bound, f"({self._source(bound)}) {sign} 1", "bound")
            case ast.Expr(value=ast.Call()):
                yield self._put(node, "pass", "dropped call")
            case ast.Call(args=arguments, func=function):
                yield from self._swapped(_name(function), arguments)
            case ast.Continue() | ast.Break():
                yield self._put(node, "pass", "dropped jump")
            case ast.Return(value=ast.Compare() | ast.BoolOp() as value):
                yield self._put(value, f"not ({self._source(value)})", "returned")
            case ast.Return(value=ast.expr() as value) if not isinstance(value, ast.Constant):
                yield self._put(value, "None", "returned")

    def _swapped(self, called: str, arguments: list[ast.expr]) -> Iterator[Change]:
        for left, right in itertools.pairwise(arguments):
            first, second = self._source(left), self._source(right)
            if called == "range":
                yield self._put(right, f"({second}) - 1", "bound")
            starred = isinstance(left, ast.Starred) or isinstance(right, ast.Starred)
            if called not in _FIXED and not starred and first != second:
                begin, end = self._span(left)[0], self._span(right)[1]
                between = self.text[self._span(left)[1] : self._span(right)[0]].decode()
                old, new = self.text[begin:end].decode(), second + between + first
                where = (self.path, left.lineno, left.col_offset)
                yield Change(*where, old, new, "swapped arguments")


def _considered(node: ast.AST) -> Iterator[ast.AST]:
    """What is within a node, without what is for people and type checkers."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "bases"):
            continue
        for child in value if isinstance(value, list) else [value]:
            match child:
                case ast.Raise() | ast.Assert() | ast.JoinedStr():
                    continue
                case ast.FunctionDef(name="__repr__" | "__str__"):
                    continue
                case ast.If(test=test) if "TYPE_CHECKING" in ast.unparse(test):
                    continue
                case ast.Expr(value=ast.Call(func=function)) if _name(function) in _WORDS:
                    continue
                case ast.AST():
                    yield child


def _name(function: ast.expr) -> str:
    return ast.unparse(function).rpartition(".")[2]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )


def blocks(path: str, tree: ast.Module) -> Iterator[tuple[str, list[ast.stmt]]]:
    """Every list of statements in a function, with a name that does not change with its line."""

    def within(node: ast.AST, function: str) -> Iterator[tuple[str, list[ast.stmt]]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            function = f"{function}.{node.name}"
        for _, value in ast.iter_fields(node):
            listed = isinstance(value, list) and value and isinstance(value[0], ast.stmt)
            if listed and function != TOP and not isinstance(node, ast.ClassDef | ast.With):
                yield function, value
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from within(child, function)

    counts: dict[str, int] = {}
    for function, statements in within(tree, TOP):
        counts[function] = counts.get(function, 0) + 1
        yield f"{path}:{function}:{counts[function]}", statements


def block_at(path: str, source: str, line: int) -> str:
    """The innermost block of a function that a line is in; the file itself for its top."""
    found = f"{path}:{TOP}:0"
    for name, statements in blocks(path, ast.parse(source)):
        if statements[0].lineno <= line <= (statements[-1].end_lineno or 0):
            found = name
    return found


def marked(path: str, source: str, numbers: dict[str, int]) -> str:
    """The source with a mark in every block, which gets the next number."""
    tree = ast.parse(source)
    for name, statements in list(blocks(path, tree)):
        number = numbers.setdefault(name, len(numbers))
        text = isinstance(statements[0], ast.Expr) and _is_text(statements[0].value)
        statements[int(text) : int(text)] = ast.parse(f"_marks_[{number}] = 1").body
    first = 0
    while first < len(tree.body) and (
        isinstance(tree.body[first], ast.Expr)
        or ast.unparse(tree.body[first]).startswith("from __future__")
    ):
        first += 1
    tree.body[first:first] = ast.parse(_FIND).body
    return ast.unparse(tree)


# A program that sees nothing installed marks where nobody looks.
_FIND = """
try:
    from fsdpcore._marks import marks as _marks_
except ImportError:
    _marks_ = bytearray(1 << 16)
"""
# Processes and threads share a file: what a rank has run counts, however it ended.
MARKS = """
import mmap, os
marks = bytearray(1 << 16)
if "MUTATE_MARKS" in os.environ:
    with open(os.environ["MUTATE_MARKS"], "r+b") as file:
        marks = mmap.mmap(file.fileno(), 1 << 16)
"""
