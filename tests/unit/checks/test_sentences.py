"""The sentences that are drawn for a reading."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

from checks.sentences import draw, of_comments, of_documentation, of_package, sentences

PAGE = """# A title that is no sentence.

One sentence, with a [link to it](page.md#there). `Another` one
goes on in the next line.

```python
print("This is no sentence of the page.")
```

| a table | has none of the sentences |
|---|---|

- An item that has words. And a second sentence in it.
- Too short.

<!-- numbers: made by a.program -->

A program has made this sentence.

<!-- end of numbers -->

<a id="an-anchor-of-links"></a>
A paragraph stands after the anchor. <!-- A comment is no sentence. -->
"""


def test_only_prose_of_a_page_counts_as_sentences_and_not_code_or_tables() -> None:
    assert list(sentences(PAGE)) == [
        "One sentence, with a link to it.",
        "`Another` one goes on in the next line.",
        "An item that has words.",
        "And a second sentence in it.",
        "A paragraph stands after the anchor.",
    ]


def test_the_sentence_check_draws_the_same_sentences_for_the_same_seed() -> None:
    found = list(of_documentation())
    assert len(found) > 500
    drawn = draw(found, 100, 1)
    assert len(set(drawn)) == 100
    assert drawn == draw(found, 100, 1) != draw(found, 100, 2)
    # The first modules have enough sentences. All modules take two seconds.
    assert len(list(islice(of_package(), 1000))) == 1000


def test_the_lines_of_a_comment_are_joined_and_comments_beside_code_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        "#: One sentence in\n#: two lines. Another sentence of it.\nx = 1  # noqa: X  # a reason of some words\n"
        "\n# A comment after a blank line.\n"
    )
    assert [sentence.text for sentence in of_comments(path)] == [
        "One sentence in two lines.",
        "Another sentence of it.",
        "A comment after a blank line.",
    ]
