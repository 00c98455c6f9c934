"""omlx-submit submit, watch and result: jobs and their text."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import click

from omlx_producer.bulk.batch import is_batch_id
from omlx_producer.bulk.output import OUTPUT_SUFFIXES
from omlx_producer.cli.batch import watch_batch
from omlx_producer.cli.show import show_result, show_stream
from omlx_producer.client.compiling import require_compilable
from omlx_producer.client.models import only_model, takes_chats
from omlx_producer.commands.options import given, model_option, refuse_conflicts, sampling_options
from omlx_producer.commands.session import goes_on, job_argument, open_producer, redis_option
from omlx_producer.program import INVALID, SectionedCommand, fail, json_option, option
from omlx_producer.wire import PRIORITIES, GenerationRequest, Priority, text_fields

_request = partial(option, section="Request")
_output = partial(option, section="Output")


def _one_prompt(
    _context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]
) -> str:
    if len(words) > 1:
        raise click.UsageError(f"PROMPT: got {len(words)} arguments; quote the prompt")
    [word] = words
    if word.endswith(OUTPUT_SUFFIXES) and Path(word).is_file():
        raise click.UsageError(f"PROMPT: got a file; run its rows with omlx-submit run {word}")
    return word


_FIRST = (
    *("model", "raw", "system", "max_completion_tokens", "temperature", "response_format"),
    *("choice", "no_stream", "detach", "as_json", "redis_url"),
)


@click.command(cls=SectionedCommand, first=_FIRST)
@click.argument("prompt", nargs=-1, required=True, metavar="PROMPT", callback=_one_prompt)
@model_option("A model's alias; not needed if only one is served.")
@_request(
    "--priority",
    type=click.Choice(PRIORITIES),
    default="default",
    help="Queue for jobs that are urgent, usual, or can wait.",
)
@_request("--raw", is_flag=True, help="Send the text as a bare prompt, not as a user message.")
@_request("--system", metavar="TEXT", help="A system message before it.")
@_request("--queue-anyway", is_flag=True, help="Take a model that no worker has announced.")
@_request("--idempotency-key", metavar="KEY", help="Submitting again with KEY gives the same job.")
@_request("--idempotent", is_flag=True, help="Make the idempotency key from the request.")
@sampling_options
@_output("--no-stream", is_flag=True, help="Print the whole text when it is complete.")
@_output("--detach", is_flag=True, help="Print the job's id and do not wait.")
@json_option
@redis_option
@click.version_option(package_name="omlx-queue", hidden=True)
def submit(
    prompt: str,
    model: str | None,
    priority: Priority,
    raw: bool,
    system: str | None,
    no_stream: bool,
    detach: bool,
    queue_anyway: bool,
    idempotency_key: str | None,
    idempotent: bool,
    as_json: bool,
    redis_url: str | None,
    **sampling: Any,
) -> None:
    """Submit PROMPT ("-" is stdin) and print its text.

    --json prints events, one per line; with --no-stream or --probabilities, the response body.
    """
    refuse_conflicts(raw, system, sampling)
    text = read_stdin() if prompt == "-" else prompt
    if not text.strip():
        fail(INVALID, "PROMPT: is empty; give text")
    with open_producer(redis_url) as producer:
        models = producer.models()
        model = model or only_model(models, vectors=False)
        needed = system is not None or sampling["tools"] is not None
        chat = not raw and (needed or takes_chats(models, model))
        fields = text_fields(text, chat=chat, system=system) | given(sampling) | {"model": model}
        # No text is generated for probabilities, so nothing comes before the result.
        whole = bool(no_stream or sampling["probabilities"])
        if not detach:
            fields["stream"] = not whole
        require_compilable(GenerationRequest.parse(fields))
        job = producer.submit(
            fields,
            priority=priority,
            require_known_model=not queue_anyway,
            idempotency_key=idempotency_key,
            idempotent=idempotent,
        )
        if detach:
            click.echo(job.id)
            return
        click.echo(f"job {job.id}", err=True)
        if sampling["logprobs"] and not as_json:
            click.echo("--json shows the log-probabilities", err=True)
        with goes_on("job", job.id):
            if whole:
                show_result(producer, job.id, None, as_json=as_json)
            else:
                show_stream(producer, job.id, as_json=as_json)


@click.command(cls=SectionedCommand)
@job_argument
@json_option
@redis_option
def watch(job_id: str, as_json: bool, redis_url: str | None) -> None:
    """Print the text of a job from its start, as it is generated.

    --json prints events, one per line, and the response body if no text came with them. For a
    batch, show its progress until its end.
    """
    if is_batch_id(job_id):
        watch_batch(job_id, redis_url, as_json=as_json)
        return
    with open_producer(redis_url) as producer:
        producer.connection.ping()
        with goes_on("job", job_id):
            show_stream(producer, job_id, as_json=as_json)


@click.command(cls=SectionedCommand)
@job_argument
@option(
    "--timeout",
    section="Request",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait at most this long; by default until the end.",
)
@json_option
@redis_option
def result(job_id: str, timeout: float | None, as_json: bool, redis_url: str | None) -> None:
    """Wait for a job and print its text.

    --json prints the response body. Exit codes: 0 done, 1 the job failed or was cancelled, 2 usage,
    3 Redis unreachable, 4 it has not ended within --timeout.
    """
    if is_batch_id(job_id):
        raise click.UsageError(f"{job_id} is a batch; see omlx-submit results {job_id}")
    with open_producer(redis_url) as producer:
        producer.connection.ping()
        with goes_on("job", job_id):
            show_result(producer, job_id, timeout, as_json=as_json)


def read_stdin() -> str:
    if sys.stdin is None:
        fail(INVALID, "stdin: is closed; give PROMPT, or pipe it into the command")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        fail(
            INVALID,
            f"stdin: got bytes that are not UTF-8 (byte 0x{error.object[error.start]:02x}); "
            "convert them, as iconv -f WINDOWS-1252 -t UTF-8 does",
        )
