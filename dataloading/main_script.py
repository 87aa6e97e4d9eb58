"""What a worker that is not forked does with the program's script: it runs it, but for its guard."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dataloading.pickling import main_is_importable


@dataclass(frozen=True)
class MainScript:
    """A script, as its workers see it.

    Attributes:
        name: Name of its file.
        has_guard: Whether it has an `if __name__ == "__main__":`.
        lines_run: Lines of calls and loops outside of that, which every worker runs too.
        under_guard: Classes and functions under it, which no worker finds.
    """

    name: str
    has_guard: bool
    lines_run: tuple[int, ...]
    under_guard: tuple[str, ...]


def read_main_script() -> MainScript | None:
    """Look at the script that is running; None in a notebook, or where it cannot be read."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if file is None or not main_is_importable():
        return None
    try:
        source = Path(file).read_text(encoding="utf-8")
        return look_at_script(source, Path(file).name)
    except (OSError, ValueError, SyntaxError):  # an archive or a compiled program
        return None


def look_at_script(source: str, name: str) -> MainScript:
    """Look at the source text of a script.

    Args:
        source: Its text.
        name: What to call it.

    Returns:
        A `MainScript`.

    Raises:
        SyntaxError: It is not Python.

    Example:
        >>> look_at_script("import os\\nprint(os.sep)", "train.py").lines_run
        (2,)
    """
    top = ast.parse(source).body
    guards = [node for node in top if isinstance(node, ast.If) and _is_guard(node)]
    outside = list(_statements([node for node in top if not _is_guard(node)]))
    inside = list(_statements([part for guard in guards for part in guard.body]))
    known = {node.name for node in outside if isinstance(node, DEFINITIONS)}
    hidden = [node.name for node in inside if isinstance(node, DEFINITIONS)]
    return MainScript(
        name=name,
        has_guard=bool(guards),
        lines_run=tuple(node.lineno for node in outside if _does_something(node)),
        under_guard=tuple(one for one in dict.fromkeys(hidden) if one not in known),
    )


DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def _statements(nodes: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements, and those inside of `if` and `try`."""
    for node in nodes:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _is_guard(node: ast.stmt) -> bool:
    if not isinstance(node, ast.If) or not isinstance(node.test, ast.Compare):
        return False
    sides = [node.test.left, *node.test.comparators]
    named = any(isinstance(side, ast.Name) and side.id == "__name__" for side in sides)
    return named and any(
        isinstance(side, ast.Constant) and side.value == "__main__" for side in sides
    )


def _does_something(node: ast.stmt) -> bool:
    """Whether a statement is more than an import, a definition or a setting."""
    if isinstance(node, ast.For | ast.While | ast.With):
        return True
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
