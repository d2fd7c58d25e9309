"""Matches names with regular expressions, in a time that grows linearly with the length of the name.

Python's `re` tries all paths through an expression, one after the other. With ``(a+)+$`` a name of 30 letters can block
the event loop for seconds. This module follows all paths at the same time. It converts an expression to a graph of
nodes. A node matches one character, or can be passed without a character. `Pattern.search` reads a name character by
character, and keeps the set of nodes that are reached with the characters read so far. So the time is at most
proportional to the number of characters times the number of nodes. The number of nodes is limited. For each set and
character, `Pattern` caches the next set, so a later name often needs only a look-up for each character.

`Pattern` refuses back references, conditional groups, lookahead and lookbehind, word boundaries, atomic groups,
possessive repeats, and all flags except ``(?i)`` for the whole expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

__all__ = ["Pattern", "compile_pattern"]

# Use the private parser of `re`, because `re` has no public parser.
_parser: Any = getattr(re, "_parser")  # noqa: B009
_Test = Callable[[str], bool]

_CATEGORIES: dict[str, _Test] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda character: character.isalnum() or character == "_",
}


class _Node:
    """A node in the graph of an expression.

    Attributes:
        test: function that returns True if the node matches a character; ``None`` if the node needs no character.
        anchor: ``^``, ``$`` or ``Z`` (the very end) if the node can be passed only there; otherwise an empty text.
        following: the nodes to which an edge leads from this node.
    """

    __slots__ = ("anchor", "following", "test")

    def __init__(self, following: Iterable[_Node], test: _Test | None = None, anchor: str = "") -> None:
        self.following = list(following)
        self.test = test
        self.anchor = anchor


class Pattern:
    """A compiled regular expression.

    Raises:
        ValueError: the expression is invalid, is too large, or has a feature that is refused.
        TypeError: the expression is not a str.
    """

    #: Maximum number of characters of an expression.
    MAX_LENGTH = 1000
    #: Maximum number of nodes in the graph of an expression.
    MAX_NODES = 1000
    #: Maximum number of entries in the cache of sets. A full cache is emptied before the next entry is stored.
    MAX_STEPS = 4096

    def __init__(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"it must be a str, not {type(text).__name__}")
        if len(text) > self.MAX_LENGTH:
            raise ValueError(f"it has {len(text)} characters, of at most {self.MAX_LENGTH}")
        try:
            tree = _parser.parse(text)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"it is not a regular expression: {error}") from None
        flags = tree.state.flags
        if flags & ~(re.UNICODE | re.IGNORECASE):
            raise _refused("a flag other than (?i)")
        self._ignores_case = bool(flags & re.IGNORECASE)
        self._nodes = 0
        self._match = _Node(())
        self._entry = self._sequence(tree, self._match)
        self._again = self._closure((self._entry,), at_start=False)
        self._steps: dict[tuple[frozenset[_Node], str], frozenset[_Node]] = {}

    # Building the graph. Nodes are created from the end of the expression to its start.

    def _node(self, following: Iterable[_Node], test: _Test | None = None, anchor: str = "") -> _Node:
        self._nodes += 1
        if self._nodes > self.MAX_NODES:
            raise ValueError("it is too large after its repeats are expanded")
        return _Node(following, test, anchor)

    def _sequence(self, items: Any, following: _Node) -> _Node:
        for kind, value in reversed(list(items)):
            following = self._item(str(kind), value, following)
        return following

    def _item(self, kind: str, value: Any, following: _Node) -> _Node:
        match kind:
            case "LITERAL" | "NOT_LITERAL":
                test = self._folded(chr(value).__eq__)
                return self._node((following,), _negated(test) if kind == "NOT_LITERAL" else test)
            case "ANY":
                return self._node((following,), "\n".__ne__)
            case "IN":
                return self._node((following,), self._one_of(value))
            case "BRANCH":
                return self._node([self._sequence(branch, following) for branch in value[1]])
            case "SUBPATTERN":
                _, added, removed, items = value
                if added or removed:
                    raise _refused("a flag for a part of the expression")
                return self._sequence(items, following)
            case "MAX_REPEAT" | "MIN_REPEAT":
                least, most, items = value
                return self._repeat(least, most, items, following)
            case "AT":
                return self._anchor(str(value), following)
        raise _refused(_NAMES.get(kind, kind))

    def _repeat(self, least: int, most: int, items: Any, following: _Node) -> _Node:
        if most == _parser.MAXREPEAT:
            again = self._node((following,))
            again.following.append(self._sequence(items, again))
            following = again
        else:
            end = following
            for _ in range(most - least):
                following = self._node((self._sequence(items, following), end))
        for _ in range(least):
            before = following
            following = self._sequence(items, following)
            if following is before:
                break
        return following

    def _anchor(self, kind: str, following: _Node) -> _Node:
        anchors = {"AT_BEGINNING": "^", "AT_BEGINNING_STRING": "^", "AT_END": "$", "AT_END_STRING": "Z"}
        if kind not in anchors:
            raise _refused("a word boundary")
        return self._node((following,), anchor=anchors[kind])

    def _one_of(self, items: Any) -> _Test:
        tests: list[_Test] = []
        is_negated = False
        for kind, value in items:
            match str(kind):
                case "NEGATE":
                    is_negated = True
                case "LITERAL":
                    tests.append(chr(value).__eq__)
                case "RANGE":
                    tests.append(_between(*value))
                case "CATEGORY":
                    name = str(value)
                    positive = _CATEGORIES[name.replace("_NOT_", "_")]
                    tests.append(_negated(positive) if "_NOT_" in name else positive)
        test = self._folded(lambda character: any(test(character) for test in tests))
        return _negated(test) if is_negated else test

    def _folded(self, test: _Test) -> _Test:
        if not self._ignores_case:
            return test
        return lambda character: test(character) or test(character.lower()) or test(character.upper())

    # Matching.

    def _closure(self, nodes: Iterable[_Node], *, at_start: bool, at_end: str = "") -> frozenset[_Node]:
        """Return `nodes`, and the nodes that can be reached from them without a character.

        `at_start` is True if ``^`` can be passed. `at_end` contains the anchors ``$`` and ``Z`` that can be passed.
        """
        found: set[_Node] = set()
        todo = list(nodes)
        while todo:
            node = todo.pop()
            if node in found:
                continue
            found.add(node)
            if node.test is None and (not node.anchor or (at_start if node.anchor == "^" else node.anchor in at_end)):
                todo += node.following
        return frozenset(found)

    def search(self, name: str) -> bool:
        """Return True if any part of a name matches."""
        at_start = True
        reached = self._closure((self._entry,), at_start=True)
        last = len(name) - 1
        for index, character in enumerate(name):
            if self._match in reached:
                return True
            if index == last and character == "\n" and self._ends(reached, "$", at_start=at_start):
                return True
            at_start = False
            step = reached, character
            following = self._steps.get(step)
            if following is None:
                following = self._step(*step)
                if len(self._steps) >= self.MAX_STEPS:
                    self._steps.clear()
                self._steps[step] = following
            reached = following
        return self._ends(reached, "$Z", at_start=at_start)

    def _step(self, reached: frozenset[_Node], character: str) -> frozenset[_Node]:
        taken = [node.following[0] for node in reached if node.test is not None and node.test(character)]
        return self._closure(taken, at_start=False) | self._again

    def _ends(self, reached: frozenset[_Node], anchors: str, *, at_start: bool) -> bool:
        return self._match in self._closure(reached, at_start=at_start, at_end=anchors)


_NAMES = {
    "GROUPREF": "a back reference",
    "GROUPREF_EXISTS": "a conditional group",
    "ASSERT": "a lookahead or lookbehind",
    "ASSERT_NOT": "a lookahead or lookbehind",
    "ATOMIC_GROUP": "an atomic group",
    "POSSESSIVE_REPEAT": "a possessive repeat",
}


def _refused(what: str) -> ValueError:
    return ValueError(f"{what} is not supported in a pattern; leave it out")


def _between(first: int, last: int) -> _Test:
    return lambda character: first <= ord(character) <= last


def _negated(test: _Test) -> _Test:
    return lambda character: not test(character)


@lru_cache(maxsize=1024)
def compile_pattern(text: str) -> Pattern:
    """Return the `Pattern` of an expression, from a cache if possible. The errors are those of `Pattern`."""
    return Pattern(text)
