"""How ends are told and read."""

from __future__ import annotations

from pathlib import Path

import pytest

from omlx_gateway.errors import api_error
from omlx_producer import EndEvent, InvalidRequest, JobCancelled, JobFailed
from omlx_producer.wire import End, parse_event
from omlx_producer.wire.end import ENDED, STATES, State

WIRE = Path(__file__).parents[3] / "docs" / "wire.md"


def test_the_page_of_the_wire_has_the_table() -> None:
    text = WIRE.read_text()
    rows = {line.split("`")[1]: line for line in text.splitlines() if line.startswith("| `")}
    for code, state in STATES.items():
        if code in rows:
            names = [f"`{name}`" for name in (state.type, state.rq, state.outcome)]
            assert all(name in rows[code] for name in names), code
            assert rows[code].endswith(f"| {state.http} |")
        assert f"`{code}`" in text


def test_a_refusal_reads_back_with_its_parts() -> None:
    refused = End.refusing(InvalidRequest("temperature", "got 9", "give a number from 0 to 2"))
    event = parse_event(EndEvent.of("j", 3, refused).model_dump_json())
    assert isinstance(event, EndEvent)
    assert (event.type, event.error) == (
        "failed",
        "temperature: got 9; give a number from 0 to 2",
    )
    assert event.end == refused


@pytest.mark.parametrize(
    ("type_", "code", "read"),
    [
        ("done", "", "finished"),
        ("failed", "", "failed"),
        ("cancelled", "", "cancelled"),
        ("failed", "of a newer worker", "failed"),
        ("cancelled", "of a newer worker", "cancelled"),
        ("failed", "finished", "failed"),
    ],
)
def test_an_end_of_another_version_counts_as_its_type(type_: str, code: str, read: str) -> None:
    event = EndEvent.model_validate({"type": type_, "job_id": "j", "n": 0, "code": code})
    assert event.end.code == read


def test_an_end_without_an_answer_is_an_error_with_its_parts() -> None:
    error = End("expired", "too late", remedy="give it longer").error("j")
    assert isinstance(error, JobFailed)
    assert (str(error), error.code, error.remedy) == (
        "too late; give it longer",
        "expired",
        "give it longer",
    )
    assert isinstance(End("cancelled", "x").error("j"), JobCancelled)


def test_a_new_state_of_jobs_is_a_line_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STATES, "skipped", State("cancelled", "stopped", "skipped", 409))
    event = EndEvent.of("j", 0, End("skipped", "not needed any more"))
    error = event.end.error("j")
    answer = api_error(error)
    assert isinstance(error, JobCancelled)
    assert (event.type, error.code) == ("cancelled", "skipped")
    assert (answer.status, answer.code, answer.message) == (409, "job_skipped", str(error))


def test_every_ended_status_of_rq_has_a_code_that_writes_such_a_status() -> None:
    assert {ENDED[state.rq] for state in STATES.values()} == set(ENDED.values())
