"""Patterns of policies: the same matches as with `re`, in linear time."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from qflow_client.broker.policies.patterns import Pattern
from qflow_client.broker.policies.policy import Policy, PolicyDefinition
from tests.effort import rounds

ATOMS = st.sampled_from([*"ab.1", "[ab]", "[^a]", "[a-c1]", r"\d", r"\W", r"\s", "^", "$", r"\A", r"\Z", "A", r"[^\d]"])
REPEATS = st.sampled_from(["", "*", "+", "?", "{2}", "{0,2}", "{1,}", "*?", "+?"])


def combined(inner):
    grouped = st.tuples(st.sampled_from(["({})", "(?:{})"]), inner, REPEATS).map(lambda t: t[0].format(t[1]) + t[2])
    return st.one_of(grouped, st.tuples(inner, inner).map("".join), st.tuples(inner, inner).map("|".join))


PATTERNS = st.recursive(st.tuples(ATOMS, REPEATS).map("".join), combined, max_leaves=6)


@given(PATTERNS, st.text("abAB1.\n_", max_size=8), st.booleans())
@settings(max_examples=rounds(500), deadline=None)
@example("a$", "a\n", False)
@example(r"a\Z", "a\n", False)
@example("(a*)*", "", False)
@example("[^a]", "A", True)
def test_a_policy_pattern_matches_the_same_names_as_the_re_module(text, name, ignores_case):
    text = f"(?i){text}" if ignores_case else text
    try:
        expected = re.compile(text)
    except re.error:
        with pytest.raises(ValueError):
            Pattern(text)
        return
    assert Pattern(text).search(name) is (expected.search(name) is not None)


@pytest.mark.parametrize("text", ["(a+)+$", "^(a|aa)+$", "(a*)*b", ".*.*.*.*.*.*b", "(a?){200}a{200}"])
def test_the_number_of_steps_to_match_a_policy_pattern_is_linear_in_the_length_of_the_name(text):
    name = "a" * 254 + "!"
    pattern = Pattern(text)
    tests = 0
    for node in {each for start in (pattern._entry,) for each in reachable(start)}:
        if node.test is not None:

            def counted(character, test=node.test):
                nonlocal tests
                tests += 1
                return test(character)

            node.test = counted
    pattern.search(name)
    assert 0 < tests <= pattern.MAX_NODES * len(name)


def reachable(node):
    found, todo = set(), [node]
    while todo:
        each = todo.pop()
        if each not in found:
            found.add(each)
            todo += each.following
    return found


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (r"(a)\1", "a back reference is not supported in a pattern"),
        ("a(?=b)", "a lookahead or lookbehind"),
        ("(?<!a)b", "a lookahead or lookbehind"),
        (r"\bb", "a word boundary"),
        ("(?>a+)b", "an atomic group"),
        ("a++b", "a possessive repeat"),
        ("(a)?(?(1)b|c)", "a conditional group"),
        ("(?s)a", r"a flag other than \(\?i\)"),
        ("(?i:a)b", "a flag for a part"),
        ("a{1001}", "too large after its repeats are expanded"),
        ("a" * 1001, "1001 characters, of at most 1000"),
        ("(", "unterminated"),
    ],
)
def test_a_policy_pattern_that_has_unsupported_syntax_or_is_too_large_raises_an_error_with_the_reason(text, why):
    with pytest.raises(ValueError, match=why):
        Policy("p", PolicyDefinition(max_count=1), pattern=text)


def test_a_policy_pattern_may_repeat_an_empty_group_any_number_of_times():
    assert Pattern("(?:){4000000000}a").search("ba")


def test_the_cache_of_a_policy_pattern_is_bounded(monkeypatch):
    monkeypatch.setattr(Pattern, "MAX_STEPS", 3)
    pattern = Pattern("abc$")
    assert [pattern.search(name) for name in ("abc", "xyz", "xabc", "abcd")] == [True, False, True, False]
    assert len(pattern._steps) <= 3
