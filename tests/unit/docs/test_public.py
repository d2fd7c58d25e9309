from __future__ import annotations

from checks.public import LIST, api, text


def test_the_public_interface_equals_the_checked_in_list() -> None:
    assert text() == LIST.read_text(), "read docs/stability.md; if the change is intended: python -m checks.public"


def test_the_list_of_the_public_interface_has_names_members_options_and_operations() -> None:
    lines = LIST.read_text().splitlines()
    assert {"qflow send", "    --routing-key -k", "GET /api/queues"} <= set(lines)
    assert any(line.startswith("    async send(self, message: ") for line in api())
