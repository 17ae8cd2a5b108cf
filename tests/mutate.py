# SPDX-License-Identifier: Apache-2.0
"""In which places a text of C or of Python can be broken by itself, and how: `make mutants RANDOM=...` draws from them.

It reads C as clang-format leaves it: a statement begins its line, a binary operator stands between spaces. Comments,
preprocessor lines, words in quotes and the parameters of a definition are left as they are. Of Python it reads the
syntax tree, and leaves types as they are.
"""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

QUIET = re.compile(
    r"""/\*.*?\*/ | //[^\n]* | ^[ ]*\#(?:[^\n]*\\\n)*[^\n]* | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
COMPARISON = re.compile(r"(?<= )(?:<=|>=|==|!=|<|>)(?= )")
OPPOSITE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPPOSITE |= {"is": "is not", "is not": "is", "in": "not in", "not in": "in"}
OPERATOR = re.compile(r"<=|>=|==|!=|<|>|is not|is|not in|in")  # of Python, between two operands
NUMBER = re.compile(r"(?<![\w.])\d+(?![\w.])")
CALL = re.compile(r"(?<![\w.>])(?!(?:if|for|while|switch|return|sizeof)\b)\w+\(")
DEFINED = re.compile(r"(?:^|[;}\n]) *(?!return\b|else\b|case\b)(?:\w+ )+\*?$")  # what stands before a definition's name
# A call, a jump, or an assignment to what has no space in it, as a declaration has.
STATEMENT = re.compile(
    r"(?:\w+\([^;]*\)|return\b[^;]*|break|continue|goto \w+|\*?[\w.>-]+(?:\[[^;=]*\][\w.>-]*)* [-+*/|&^]?=(?!=)[^;]*"
    r"|\*?[\w.>-]+(?:\[[^;=]*\][\w.>-]*)*(?:\+\+|--));"
)
# Of Python: what leaves no name behind that later statements miss.
_DROPPED = (ast.Expr, ast.AugAssign, ast.Return, ast.Raise, ast.Continue, ast.Break)
LINE = re.compile(r"(?<=\n) +(?=\S)")
KINDS = ("comparison", "off by one", "swapped arguments", "dropped statement")


@dataclass(frozen=True)
class Change:
    """What comes in the place of text[start:end]."""

    start: int
    end: int
    replacement: str


def readable(text: str) -> str:
    """The text, of the same length, with blanks for what is left as it is."""
    return QUIET.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def comparisons(code: str) -> list[Change]:
    return [Change(*x.span(), OPPOSITE[x[0]]) for x in COMPARISON.finditer(code)]


def numbers(code: str) -> list[Change]:
    return [
        Change(*x.span(), str(int(x[0]) + by)) for x in NUMBER.finditer(code) for by in (-1, 1) if int(x[0]) + by >= 0
    ]


def arguments(code: str, begin: int) -> list[tuple[int, int]]:
    """Where each argument lies of the call whose parenthesis ends before `begin`."""
    depth, start, found = 0, begin, []
    for at in range(begin, len(code)):
        if depth == 0 and code[at] in ",)":
            found.append((start + len(code[start:at]) - len(code[start:at].lstrip()), at))
            start = at + 1
            if code[at] == ")":
                return found
        depth += (code[at] in "([{") - (code[at] in ")]}")
    return []


def swaps(text: str, code: str) -> list[Change]:
    """Of neighbouring arguments that differ."""
    found = []
    for call in CALL.finditer(code):
        if DEFINED.search(code[max(0, call.start() - 100) : call.start()]):
            continue
        given = arguments(code, call.end())
        for (a, b), (c, d) in pairwise(given):
            if text[a:b] != text[c:d]:
                found.append(Change(a, d, text[c:d] + text[b:c] + text[a:b]))
    return found


def drops(code: str) -> list[Change]:
    """Of statements; what follows an `if` leaves an empty one behind."""
    found = []
    for line in LINE.finditer(code):
        statement = STATEMENT.match(code, line.end())
        if statement and statement[0].count("(") == statement[0].count(")"):
            found.append(Change(*statement.span(), ";"))
    return found


def of_c(text: str) -> tuple[list[Change], ...]:
    code = readable(text)
    return comparisons(code), numbers(code), swaps(text, code), drops(code)


class _Python(ast.NodeVisitor):
    """Collects the changes of each kind."""

    def __init__(self, text: str):
        self.text, self.found = text, tuple(list[Change]() for _ in KINDS)
        self.lines = text.splitlines(keepends=True)
        self.starts = [0, *accumulate(map(len, self.lines))]
        self.visit(ast.parse(text))

    def at(self, line: int, column: int) -> int:
        """Gives the place of a column that counts bytes."""
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: Any) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def add(self, kind: str, start: int, end: int, replacement: str) -> None:
        self.found[KINDS.index(kind)].append(Change(start, end, replacement))

    def visit(self, node: ast.AST) -> None:
        if isinstance(node, _DROPPED) and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            self.add("dropped statement", *self.span(node), "pass")
        super().visit(node)

    def visit_arg(self, node: ast.arg) -> None:
        """A parameter's type stays."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        for part in (*node.decorator_list, node.args, *node.body):
            self.visit(part)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """What an error says stays."""

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in pairwise((node.left, *node.comparators)):
            begin, end = self.span(left)[1], self.span(right)[0]
            (operator,) = OPERATOR.finditer(self.text, begin, end)
            self.add("comparison", *operator.span(), OPPOSITE[operator[0]])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if type(node.value) is int:
            for by in (-1, 1):
                if node.value + by >= 0:
                    self.add("off by one", *self.span(node), str(node.value + by))

    def visit_Call(self, node: ast.Call) -> None:
        for (a, b), (c, d) in pairwise(map(self.span, node.args)):
            if self.text[a:b] != self.text[c:d]:
                self.add("swapped arguments", a, d, self.text[c:d] + self.text[b:c] + self.text[a:b])
        self.generic_visit(node)


def changes(text: str, language: str = "c") -> dict[str, list[Change]]:
    """All of each kind. language: c or py."""
    return dict(zip(KINDS, _Python(text).found if language == "py" else of_c(text), strict=True))


def as_texts(text: str, change: Change) -> tuple[str, str]:
    """What to find, which is there once, and what to put in its place: the change with as many of the lines around it
    as that takes."""
    start, end = text.rfind("\n", 0, change.start) + 1, text.find("\n", change.end)
    while text.count(text[start:end]) != 1:
        start = text.rfind("\n", 0, start - 1) + 1
        end = max(end, text.find("\n", end + 1))
    return text[start:end], text[start : change.start] + change.replacement + text[change.end : end]


def draw(texts: dict[str, str], number: int, seed: int) -> list[tuple[str, str, Change]]:
    """So many changes as (kind, file, change), the kinds by turns; more of them begin with fewer."""
    rng, found = random.Random(seed), []
    all_of = {file: changes(texts[file], "py" if file.endswith(".py") else "c") for file in sorted(texts)}
    places = {kind: [(kind, file, x) for file in all_of for x in all_of[file][kind]] for kind in KINDS}
    for kind in KINDS:
        rng.shuffle(places[kind])
    for i in range(number):
        found.append(places[KINDS[i % len(KINDS)]][i // len(KINDS)])
    return found
