"""Whatever a server loses, and however it is written again, a consumer gets every token once."""

from __future__ import annotations

from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AuthenticationError

from omlx_producer import InvalidRequest, TokensLost, UnknownJob
from omlx_producer.client import stream
from omlx_producer.client.stream import PAGE, Delivered, Follower
from omlx_producer.outage import Reconnection
from omlx_producer.wire import (
    ChoiceDelta,
    EndEvent,
    JobEvent,
    TokensEvent,
    Usage,
    token_digest,
)

JOB = "j"
Entry = tuple[bytes, dict[bytes, bytes]]


def delta(index: int, said: str, since: int, until: int, text: int | None = None) -> ChoiceDelta:
    """A choice's tokens, one for each letter of what it says in all, and their text."""
    ids = [ord(letter) for letter in said]
    return ChoiceDelta(
        index=index,
        text=said[since if text is None else text : until],
        tokens=ids[since:until],
        start=since,
        offset=since if text is None else text,
        digest=token_digest(ids[:until]),
    )


def tokens(since: int, until: int, said: str = "abcdefgh") -> TokensEvent:
    return TokensEvent(job_id=JOB, n=until, choices=[delta(0, said, since, until)])


def done(n: int, *ends: ChoiceDelta) -> EndEvent:
    usage = Usage(prompt_tokens=1, completion_tokens=n, total_tokens=n + 1)
    return EndEvent(
        type="done", job_id=JOB, n=n, finish_reasons=["stop"], choices=list(ends), usage=usage
    )


def entry(event: JobEvent) -> Entry:
    return event.stream_id.encode(), {b"event": event.model_dump_json().encode()}


def payload(event: JobEvent) -> bytes:
    return event.model_dump_json().encode()


def look(
    follower: Follower, events: list[JobEvent], status: bytes | None = b"started"
) -> list[Any]:
    """What a look at a job adds whose stream holds these events."""
    entries = [entry(event) for event in events]
    last = int(follower.after.partition("-")[0]), int(follower.after.partition("-")[2])
    after = [each for each in entries if tuple(map(int, each[0].split(b"-"))) > last]
    return list(follower.looked(status, [], after[:PAGE], entries[-1:]))


LETTERS = ("abcdefgh", "ABCDEFGH")


def cut(at: list[int], counts: tuple[int, int]) -> TokensEvent:
    """The event of the next tokens of two choices; moves on ``at``."""
    deltas = []
    for index, count in enumerate(counts):
        until = min(at[index] + count, len(LETTERS[index]))
        if until > at[index]:
            deltas.append(delta(index, LETTERS[index], at[index], until))
        at[index] = until
    return TokensEvent(job_id=JOB, n=sum(at), choices=deltas)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.integers(0, 3), st.integers(0, 3)).filter(any),
            st.integers(1, 8).map(lambda entries: ("lose", entries)),
            st.just(("read", 0)),
        ),
        max_size=20,
    )
)
def test_tokens_that_are_written_again_in_other_events_come_once(actions: list[Any]) -> None:
    """Each loss cuts off entries; the next run writes the same tokens in events of its own."""
    server: list[JobEvent] = []
    follower, got = Follower(JOB, 0, 10), list[JobEvent]()

    def read() -> None:
        follower.looks = True
        while follower.looks and not follower.over:
            got.extend(look(follower, server))

    at = [0, 0]
    for action in [*actions, (8, 8)]:
        if action[0] == "read":
            read()
        elif action[0] == "lose":
            server = server[: -action[1]]
            at = [0, 0]
            for event in server:
                assert isinstance(event, TokensEvent)
                for each in event.choices:
                    at[each.index] += len(each.tokens)
        elif any(len(LETTERS[c]) > at[c] and action[c] for c in (0, 1)):
            server.append(cut(at, action))
    server.append(done(16, *(delta(c, LETTERS[c], 8, 8) for c in (0, 1))))
    read()
    said = ["", ""]
    for event in got[:-1]:
        assert isinstance(event, TokensEvent)
        for each in event.choices:
            assert (each.start, each.offset) == (len(said[each.index]),) * 2
            said[each.index] += each.text
    assert tuple(said) == LETTERS
    assert got[-1] == server[-1]


def test_an_event_that_overlaps_what_was_had_is_trimmed() -> None:
    delivered = Delivered(JOB, 0)
    for n in range(3):
        assert delivered.take(payload(tokens(n, n + 1))) == tokens(n, n + 1)
    assert delivered.take(payload(tokens(1, 4))) == tokens(3, 4)
    assert delivered.take(payload(tokens(2, 4))) is None


@pytest.mark.parametrize("said", ["aXcdef", "abXdef", "abcXef"])
def test_other_tokens_than_were_had_are_never_mixed_with_them(said: str) -> None:
    """A job that samples without a seed's promise may write another text after a loss."""
    delivered = Delivered(JOB, 0)
    delivered.take(payload(tokens(0, 4)))
    with pytest.raises(TokensLost, match="has written them again otherwise") as caught:
        delivered.take(payload(tokens(4, 6, said)))
    assert caught.value.cursor == 0


def test_a_job_that_ends_with_other_tokens_than_were_had_does_not_look_whole() -> None:
    delivered = Delivered(JOB, 0)
    delivered.take(payload(tokens(0, 4)))
    with pytest.raises(TokensLost, match="has written them again otherwise"):
        delivered.take(payload(done(4, delta(0, "abcX", 4, 4))))


def test_text_that_came_with_a_token_that_was_had_is_read_again() -> None:
    """Another worker gives out a row's last text with its last token."""
    held_back = ChoiceDelta(index=0, text="", tokens=[97], digest=token_digest([97]))
    delivered = Delivered(JOB, 0)
    delivered.take(payload(TokensEvent(job_id=JOB, n=1, choices=[held_back])))
    end = done(1, delta(0, "a", 1, 1))
    with pytest.raises(stream._Gap):
        delivered.take(payload(end))
    rest = delivered.take(payload(tokens(0, 1)))
    assert isinstance(rest, TokensEvent)
    assert [(each.text, each.tokens) for each in rest.choices] == [("a", [])]
    assert delivered.take(payload(end)) == end


def test_tokens_that_left_the_stream_are_never_passed_over() -> None:
    delivered = Delivered(JOB, 0)
    with pytest.raises(stream._Gap):
        delivered.take(payload(tokens(4, 5)))
    with pytest.raises(TokensLost, match="tokens 1 to 4 of job j have left its stream") as caught:
        delivered.take(payload(tokens(4, 5)))
    assert caught.value.cursor == 4


def test_a_finished_job_whose_last_tokens_are_missing_does_not_look_whole() -> None:
    delivered = Delivered(JOB, 0)
    delivered.take(payload(tokens(0, 1)))
    with pytest.raises(stream._Gap):
        delivered.take(payload(done(3)))
    with pytest.raises(TokensLost, match="tokens 2 to 3 of job j"):
        delivered.take(payload(done(3)))


def test_a_cursor_inside_an_event_is_refused() -> None:
    """The text of the tokens before it is not known; only a stream that has read them knows."""
    with pytest.raises(TokensLost, match="no event of job j ends with token 2: it is") as caught:
        Delivered(JOB, 2).take(payload(tokens(1, 4)))
    assert caught.value.cursor == 0


@pytest.mark.parametrize("cursor", [-1, 2.5, True, "3", None, 10**30])
def test_a_cursor_that_is_no_count_of_tokens_is_refused(cursor: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^cursor: got .*; give the n of an event, or 0"):
        Delivered(JOB, cursor)


def test_a_job_that_never_published_ends_with_its_terminal_event() -> None:
    assert Delivered(JOB, 0).take(payload(done(7))) == done(7)


def test_a_full_page_is_followed_by_the_next() -> None:
    events: list[JobEvent] = [tokens(n, n + 1, "x" * 9999) for n in range(PAGE + 1)]
    follower = Follower(JOB, 0, 10)
    assert look(follower, events) == events[:PAGE]
    assert follower.looks
    assert look(follower, events) == events[PAGE:]
    assert not follower.looks


def test_a_stream_without_a_job_is_unknown() -> None:
    with pytest.raises(UnknownJob):
        look(Follower(JOB, 0, 10), [], None)


def test_a_stream_that_outlives_its_job_is_read_to_its_end() -> None:
    follower = Follower(JOB, 0, 10)
    assert look(follower, [tokens(0, 1), done(1)], None) == [tokens(0, 1), done(1)]
    assert follower.over


@pytest.mark.parametrize("status", [b"queued", b"scheduled", b"rate_limited", b"ready_to_enqueue"])
def test_the_end_of_an_earlier_run_is_not_the_end_of_a_job_that_waits(status: bytes) -> None:
    follower = Follower(JOB, 0, 10)
    assert look(follower, [tokens(0, 1), done(1)], status) == []
    assert follower.early
    assert look(follower, [tokens(0, 1)]) == [tokens(0, 1)]
    assert not follower.early


def test_the_end_of_a_stream_that_is_shorter_than_what_was_had_is_found() -> None:
    follower = Follower(JOB, 3, 10)
    assert look(follower, [tokens(0, 1), tokens(1, 3), done(3)]) == [done(3)]


LOST = redis.ConnectionError("gone")


def test_a_consumer_gives_up_after_its_patience_and_an_answer_forgives() -> None:
    now = [0.0]
    outage = Reconnection(10, clock=lambda: now[0])
    outage.answered()
    for second in (0, 10):
        now[0] = second
        outage.failed(LOST)
    outage.answered()
    for second in (100, 109):
        now[0] = second
        outage.failed(LOST)
    now[0] = 111
    with pytest.raises(redis.ConnectionError, match="gone"):
        outage.failed(LOST)


@pytest.mark.parametrize("error", [LOST, AuthenticationError("no")])
def test_a_server_that_never_answered_is_not_waited_for(error: redis.RedisError) -> None:
    with pytest.raises(type(error)):
        Reconnection(1e9).failed(error)
