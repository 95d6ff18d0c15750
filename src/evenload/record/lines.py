"""Where a variable or an attribute is set: file and line, read from the source."""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from functools import lru_cache
from types import CodeType
from typing import Any, Final

_TARGETS: Final = (ast.Name, ast.Attribute)


def of_variable(code: CodeType, name: str) -> str | None:
    """`file:line` at which a function or a module first sets a variable; its own first line where that is not found."""
    tree = _tree(code.co_filename)
    if tree is None:
        return None
    scope = _scope(tree, code.co_firstlineno) if code.co_name != "<module>" else tree
    line = _first_setting(scope if scope is not None else tree, name, attribute=False)
    return f"{code.co_filename}:{line or code.co_firstlineno}"


def of_global(module: Any, name: str) -> str | None:
    """`file:line` at which a module first sets a global."""
    file = getattr(module, "__file__", None)
    tree = _tree(file) if isinstance(file, str) else None
    line = None if tree is None else _first_setting(tree, name, attribute=False)
    return f"{file}:{line}" if line else None


def of_attribute(owner: type, name: str) -> str | None:
    """`file:line` at which a class, or else its module, first sets an attribute of some object."""
    cls = getattr(owner, "_forward_cls", owner)  # contexts of custom functions: the code is in the function itself
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    tree = _tree(file) if isinstance(file, str) else None
    if tree is None:
        return None
    scopes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == cls.__name__]
    for scope in scopes:
        if line := _in_body(scope, name) or _first_setting(scope, name, attribute=True):
            return f"{file}:{line}"
    line = _first_setting(tree, name, attribute=True)
    return f"{file}:{line}" if line else None


def _in_body(scope: ast.ClassDef, name: str) -> int | None:
    """Line at which the body of a class sets a name."""
    settings = [_first_setting(node, name, attribute=False) for node in scope.body if not _is_function(node)]
    return min((line for line in settings if line is not None), default=None)


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)


@lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module | None:
    lines = linecache.getlines(file)
    try:
        return ast.parse("".join(lines)) if lines else None
    except (SyntaxError, ValueError):
        return None


def _scope(tree: ast.Module, line: int) -> ast.AST | None:
    """The function whose code object begins at a line (that of its first decorator, if it has any)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            decorators = [] if isinstance(node, ast.Lambda) else node.decorator_list
            if line in {node.lineno, *(decorator.lineno for decorator in decorators)}:
                return node
    return None


def _first_setting(scope: ast.AST, name: str, *, attribute: bool) -> int | None:
    """Smallest line at which a name, or an attribute of that name, is a target."""
    lines = [
        node.lineno
        for node in ast.walk(scope)
        if isinstance(node, _TARGETS)
        and isinstance(node.ctx, ast.Store)
        and (
            (attribute and isinstance(node, ast.Attribute) and node.attr == name)
            or (not attribute and isinstance(node, ast.Name) and node.id == name)
        )
    ]
    lines += [node.lineno for node in _arguments(scope) if not attribute and node.arg == name]
    return min(lines, default=None)


def _arguments(scope: ast.AST) -> Iterator[ast.arg]:
    for node in ast.walk(scope):
        if isinstance(node, ast.arg):
            yield node
