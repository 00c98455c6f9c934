"""Whatever the channel loses, repeats or reorders, a consumer gets every event once, in order."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import AuthenticationError

from omlx_producer import InvalidRequest, TokensLost, UnknownJob
from omlx_producer.protocol import (
    CancelledEvent,
    ChoiceDelta,
    DoneEvent,
    TokenEvent,
    TokensEvent,
    Usage,
)
from omlx_producer.replay import PAGE, Replay, Step

JOB = "j"


def tokens(n: int, count: int = 1) -> TokensEvent:
    """An event after which the job has n tokens, count of them in it; 0 is text alone."""
    delta = ChoiceDelta(index=0, text=f"<{n}>", tokens=list(range(count)))
    return TokensEvent(job_id=JOB, n=n, choices=[delta])


def done(n: int) -> DoneEvent:
    usage = Usage(prompt_tokens=1, completion_tokens=n, total_tokens=n + 1)
    return DoneEvent(job_id=JOB, n=n, finish_reasons=["stop"], usage=usage)


def message(event: TokenEvent) -> dict[str, Any]:
    return {"type": "message", "data": event.model_dump_json().encode()}


def entry(event: TokenEvent) -> tuple[bytes, dict[bytes, bytes]]:
    return event.stream_id.encode(), {b"event": event.model_dump_json().encode()}


def listening(cursor: int = 0, *events: TokenEvent) -> Replay:
    """A replay that has read these events and listens now."""
    replay = Replay(JOB, cursor, reconnect_for=10)
    replay.subscribed()
    replay.heard({"type": "subscribe", "data": 1})
    assert replay.step is Step.READ
    replay.read([entry(event) for event in events], b"started")
    return replay


class Server:
    """A stream that keeps, and a channel that misbehaves as it is told."""

    def __init__(self, events: list[TokenEvent], faults: deque[str]) -> None:
        self.coming = deque(events)
        self.faults = faults
        self.stream: list[TokenEvent] = []
        self.channel: deque[TokenEvent] = deque()
        self.over = False

    def publish(self) -> None:
        """Append the next event to the stream, and deliver it, or not, on the channel."""
        event = self.coming.popleft()
        self.stream.append(event)
        fault = self.faults.popleft() if self.faults else "deliver"
        if fault == "drop":
            return
        self.channel.append(event)
        if fault == "repeat":
            self.channel.append(event)
        if fault == "swap" and len(self.channel) > 1:
            self.channel[-1], self.channel[-2] = self.channel[-2], self.channel[-1]

    def reconnect(self) -> dict[str, Any]:
        """What redis-py does silently: the channel's backlog is gone."""
        self.channel.clear()
        return {"type": "subscribe", "data": 1}

    def hear(self) -> dict[str, Any] | None:
        if self.faults and self.faults[0] == "reconnect":
            self.faults.popleft()
            return self.reconnect()
        return message(self.channel.popleft()) if self.channel else None

    def read(self, start: str) -> list[TokenEvent]:
        n, _, part = start.removeprefix("(").partition("-")
        first = int(n), int(part) + start.startswith("(")
        later = [e for e in self.stream if tuple(map(int, e.stream_id.split("-"))) >= first]
        return later[:PAGE]


@st.composite
def jobs(draw: st.DrawFn) -> list[TokenEvent]:
    events: list[TokenEvent] = []
    n = 0
    for count in draw(st.lists(st.integers(0, 4), max_size=12)):
        n += max(1, count)
        events.append(tokens(n, count))
    # A terminal event may count tokens that were never published.
    more = draw(st.integers(0, 2))
    ends = [CancelledEvent(job_id=JOB, n=n + more, error="x"), done(n if events else n + more)]
    events.append(draw(st.sampled_from(ends)))
    return events


@given(
    jobs(),
    st.lists(st.sampled_from(["deliver", "drop", "repeat", "swap", "reconnect", "lose"])),
    st.lists(st.booleans(), max_size=60),
    st.integers(0, 12),
)
def test_every_event_comes_once_and_in_order(
    events: list[TokenEvent], faults: list[str], pace: list[bool], skip: int
) -> None:
    had = events[: min(skip, len(events) - 1)]
    cursor = had[-1].n if had else 0
    server = Server(events, deque(faults))
    replay = Replay(JOB, cursor, reconnect_for=1e9)
    paces, got, now, reads = deque(pace), [], 0.0, 0
    while replay.step is not Step.END:
        if server.coming and (not paces or paces.popleft()):
            server.publish()
            continue
        now += 1
        assert now < 1000, "stuck"
        if server.faults and server.faults[0] == "lose":
            server.faults.popleft()
            server.channel.clear()
            if reads:
                replay.failed(redis.ConnectionError("gone"))
        elif replay.step is Step.SUBSCRIBE:
            replay.subscribed()
            server.channel.clear()
            got += replay.heard(server.reconnect())
        elif replay.step is Step.LISTEN:
            got += replay.heard(server.hear())
        else:
            assert replay.step is Step.READ
            got += replay.read([entry(e) for e in server.read(replay.start)], b"started")
            reads += 1
    assert got == events[len(had) :]


LETTERS = ("abcdefgh", "ABCDEFGH")


def cut(at: list[int], counts: tuple[int, int]) -> TokensEvent:
    """The event of the next tokens of two choices; moves on ``at``."""
    deltas = []
    for index, count in enumerate(counts):
        until = min(at[index] + count, len(LETTERS[index]))
        text = LETTERS[index][at[index] : until]
        deltas.append(ChoiceDelta(index=index, text=text, tokens=list(map(ord, text))))
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
    server = Server([], deque())
    replay, got = Replay(JOB, 0, reconnect_for=1e9), list[TokenEvent]()

    def read() -> None:
        if replay.step is Step.SUBSCRIBE:
            replay.subscribed()
            replay.heard({"type": "subscribe", "data": 1})
        replay.heard(None)
        while replay.step is Step.READ:
            got.extend(replay.read([entry(e) for e in server.read(replay.start)], b"started"))

    at = [0, 0]
    read()
    for action in [*actions, (8, 8)]:
        if action[0] == "read":
            read()
        elif action[0] == "lose":
            server.stream = server.stream[: -action[1]]
            at = [sum(len(e.choices[c].tokens) for e in server.stream) for c in (0, 1)]
            replay.failed(redis.ConnectionError("gone"))
        elif any(len(LETTERS[c]) > at[c] and action[c] for c in (0, 1)):
            server.stream.append(cut(at, action))
            if replay.step is Step.LISTEN:
                got.extend(replay.heard(message(server.stream[-1])))
    server.stream.append(done(16))
    read()
    said = [
        "".join(delta.text for e in got[:-1] for delta in e.choices if delta.index == c)
        for c in (0, 1)
    ]
    assert tuple(said) == LETTERS
    assert got[-1] == done(16)
    assert [e.since for e in got[1:-1]] == [e.n for e in got[:-2]]


def test_an_event_that_overlaps_what_was_had_is_trimmed() -> None:
    replay = listening(0, tokens(1), tokens(2), tokens(3))
    replay.failed(redis.ConnectionError("gone"))
    again = ChoiceDelta(index=0, text="<2><3><4>", tokens=[0, 0, 0])
    wide = TokensEvent(job_id=JOB, n=4, choices=[again])
    replay.heard({"type": "subscribe", "data": 1})
    assert replay.read([], b"started") == []
    assert replay.read([entry(tokens(1)), entry(wide)], b"started") == [tokens(4)]
    assert replay.cursor == 4
    assert replay.heard(message(tokens(5))) == [tokens(5)]
    assert replay.heard(message(tokens(7, count=3))) == []
    assert replay.step is Step.READ


def test_text_that_is_written_again_in_an_event_of_its_own_is_not_missed_at_the_end() -> None:
    def of(n: int, text: str, tokens: list[int]) -> TokensEvent:
        delta = ChoiceDelta(index=0, text=text, tokens=tokens)
        return TokensEvent(job_id=JOB, n=n, choices=[delta])

    replay = listening(0, of(1, "ab", [7]))
    replay.failed(redis.ConnectionError("gone"))
    replay.heard({"type": "subscribe", "data": 1})
    assert replay.read([], b"started") == []
    again = [of(1, "a", [7]), of(2, "b", []), done(2)]
    assert replay.read([entry(event) for event in again], b"finished") == [done(2)]


def test_a_consumer_beyond_the_end_of_the_stream_waits_for_what_it_has_not_had() -> None:
    replay = listening(0, tokens(1), tokens(2), tokens(3))
    replay.failed(redis.ConnectionError("gone"))
    replay.heard({"type": "subscribe", "data": 1})
    assert replay.read([], b"started") == []
    assert replay.read([entry(tokens(1))], b"started") == []
    assert replay.step is Step.LISTEN
    assert replay.cursor == 3
    assert [replay.heard(message(tokens(n))) for n in (2, 3, 4)] == [[], [], [tokens(4)]]


@pytest.mark.parametrize("text", ["<2>", "<2><x>", "<x><3><4>"])
def test_other_text_than_was_had_is_never_mixed_with_it(text: str) -> None:
    """A job that samples without a seed's promise may write another text after a loss."""
    replay = listening(0, tokens(1), tokens(2), tokens(3))
    replay.failed(redis.ConnectionError("gone"))
    delta = ChoiceDelta(index=0, text=text, tokens=[0] * text.count("<"))
    other = TokensEvent(job_id=JOB, n=1 + len(delta.tokens), choices=[delta])
    replay.heard({"type": "subscribe", "data": 1})
    replay.read([], b"started")
    with pytest.raises(TokensLost, match="has written them again otherwise") as caught:
        replay.read([entry(tokens(1)), entry(other), entry(done(other.n))], b"finished")
    assert caught.value.cursor == 0


def test_a_cursor_inside_an_event_is_refused() -> None:
    """The text of the tokens before it is not known; only a stream that has read them knows."""
    replay = listening(2)
    with pytest.raises(TokensLost, match="no event of job j ends with token 2: it is") as caught:
        replay.read([entry(tokens(4, count=3))], b"started")
    assert caught.value.cursor == 0


@pytest.mark.parametrize("cursor", [-1, 2.5, True, "3", None, 10**30])
def test_a_cursor_that_is_no_count_of_tokens_is_refused(cursor: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"^cursor: got .*; give the n of an event, or 0"):
        listening(cursor)


def test_a_finished_job_whose_last_tokens_are_missing_does_not_look_whole() -> None:
    with pytest.raises(TokensLost, match="tokens 2 to 3 of job j"):
        listening(0, tokens(1)).read([entry(tokens(1)), entry(done(3))], b"finished")


def test_a_second_subscription_reads_the_stream_again() -> None:
    replay = listening()
    assert replay.step is Step.LISTEN
    replay.heard({"type": "subscribe", "data": 1})
    assert replay.step is Step.READ


def test_silence_reads_the_stream_again() -> None:
    replay = listening()
    replay.heard(None)
    assert replay.step is Step.READ


def test_a_gap_reads_the_stream_again() -> None:
    replay = listening(0, tokens(1))
    assert replay.heard(message(tokens(3))) == []
    assert replay.step is Step.READ
    found = [tokens(1), tokens(2), tokens(3)]
    assert replay.read([entry(event) for event in found], b"started") == found[1:]


def test_text_without_tokens_counts_as_one_and_leaves_no_gap() -> None:
    replay = listening(0, tokens(1))
    assert replay.heard(message(tokens(2, count=0))) == [tokens(2, count=0)]
    assert replay.heard(message(done(2))) == [done(2)]


def test_what_was_had_is_dropped() -> None:
    replay = listening(0, tokens(1), tokens(2))
    assert replay.heard(message(tokens(1))) == []
    assert replay.heard(message(tokens(2))) == []
    assert replay.step is Step.LISTEN


def test_a_full_page_is_followed_by_the_next() -> None:
    replay = listening(0, *(tokens(n) for n in range(1, PAGE + 1)))
    assert replay.step is Step.READ
    assert replay.start == f"{PAGE}-0"


def test_tokens_that_left_the_stream_are_never_passed_over() -> None:
    replay = listening()
    replay.heard(None)
    with pytest.raises(TokensLost, match="tokens 1 to 4 of job j have left its stream") as caught:
        replay.read([entry(tokens(5))], b"started")
    assert caught.value.cursor == 4


def test_tokens_heard_of_that_the_stream_lacks_are_never_passed_over() -> None:
    replay = listening()
    replay.heard(message(tokens(5)))
    with pytest.raises(TokensLost):
        replay.read([], b"started")


def test_a_job_that_never_published_ends_with_its_terminal_event() -> None:
    replay = listening()
    assert replay.heard(message(done(7))) == []
    assert replay.read([entry(done(7))], b"finished") == [done(7)]
    assert replay.step is Step.END


def test_a_stream_without_a_job_is_unknown() -> None:
    replay = Replay(JOB, 0, reconnect_for=10)
    with pytest.raises(UnknownJob):
        replay.read([], None)


def test_a_stream_that_outlives_its_job_is_read_to_its_end() -> None:
    replay = Replay(JOB, 0, reconnect_for=10)
    assert replay.read([entry(tokens(1)), entry(done(1))], None) == [tokens(1), done(1)]


def test_a_job_that_runs_again_is_followed_on() -> None:
    replay = Replay(JOB, 0, reconnect_for=10)
    replay.read([], b"failed")
    assert replay.step is Step.CONCLUDE
    assert replay.conclude(b"queued", None) == []
    assert replay.step is Step.READ


def test_it_gives_up_after_its_patience() -> None:
    now = [0.0]
    replay = Replay(JOB, 0, reconnect_for=10, clock=lambda: now[0])
    replay.read([], b"started")
    lost = redis.ConnectionError("gone")
    for second in (0, 5, 10):
        now[0] = second
        replay.failed(lost)
        assert replay.step is Step.SUBSCRIBE
    now[0] = 11
    with pytest.raises(redis.ConnectionError, match="gone"):
        replay.failed(lost)


def test_a_read_that_works_forgives_what_failed() -> None:
    now = [0.0]
    replay = Replay(JOB, 0, reconnect_for=10, clock=lambda: now[0])
    replay.read([], b"started")
    replay.failed(redis.ConnectionError("gone"))
    now[0] = 9
    replay.read([], b"started")
    now[0] = 100
    replay.failed(redis.ConnectionError("gone"))
    now[0] = 109
    replay.failed(redis.ConnectionError("gone"))


def test_a_server_that_never_answered_is_not_waited_for() -> None:
    with pytest.raises(redis.ConnectionError):
        Replay(JOB, 0, reconnect_for=1e9).failed(redis.ConnectionError("refused"))


def test_a_refused_password_is_not_tried_again() -> None:
    with pytest.raises(AuthenticationError):
        listening().failed(AuthenticationError("no"))


@pytest.mark.parametrize("status", [b"queued", b"scheduled", b"rate_limited", b"ready_to_enqueue"])
def test_the_end_of_an_earlier_run_is_not_the_end_of_a_job_that_waits(status: bytes) -> None:
    replay = Replay(JOB, 0, reconnect_for=10)
    assert replay.read([entry(done(7))], status) == []
    assert replay.step is Step.LISTEN
