"""One table names the keys: docs/wire.md, scripts and modules have no others."""

from __future__ import annotations

import re
from pathlib import Path

from omlx_producer.wire.keys import KEYS, batch_waiting_key, events_key

ROOT = Path(__file__).parents[3]
ROW = re.compile(
    r"^\| (`[^|]*`) \| (hash|list|set|sorted set|stream|text|channel) \|", re.MULTILINE
)


def test_the_page_of_the_wire_describes_every_key() -> None:
    page = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
    described = {
        name: kind
        for names, kind in ROW.findall(page)
        for name in re.findall("`([^`]*)`", names)
        if not name.startswith("rq:")
    }
    assert described == {key.form: key.type for key in KEYS.values()}


def test_a_key_is_called_with_what_it_belongs_to() -> None:
    assert events_key("j1") == "omlx:events:j1"
    assert batch_waiting_key("r{1}", "omlx:m:bulk") == "omlx:batch:r{1}:waiting:omlx:m:bulk"


def test_no_module_and_no_script_spells_a_key() -> None:
    kinds = "|".join(sorted({key.split(":")[1] for key in KEYS.values()}))
    spelled = re.compile(rf"""["']omlx:({kinds})\b""")
    found = [
        f"{path.relative_to(ROOT)}: {each[0]}"
        for folder in ("producer", "worker")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".lua") and path.name != "keys.py"
        for each in spelled.finditer(path.read_text(encoding="utf-8"))
    ]
    assert found == []
