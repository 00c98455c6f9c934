"""Run an ordinary RQ job after a generation, with RQ's depends_on.

Redis is where OMLX_QUEUE_REDIS_URL or REDIS_URL says. The RQ worker runs in this script. To start
one alone: PYTHONPATH=examples rq worker reports --serializer rq.serializers.JSONSerializer
"""

from rq import Queue, SimpleWorker
from rq.serializers import JSONSerializer

from omlx_producer import Producer


def report(job_id: str) -> str:
    """The second job. An RQ worker runs it once the generation has finished."""
    with Producer() as producer:
        completion = producer.result(job_id, timeout=0)
    return f"{completion.usage.completion_tokens} tokens: {completion.text}"


def main() -> None:
    with Producer() as producer:
        models = producer.models()
        # Any model will do: the one that was announced last.
        model = max(models, key=lambda alias: models[alias].announced_at, default=None)
        generation = producer.submit(model=model, prompt="def sqrt(n):", max_completion_tokens=32)
        redis = producer.connection
        reports = Queue("reports", connection=redis, serializer=JSONSerializer)
        # RQ imports functions by name; it takes none from a script that is run.
        second = reports.enqueue("dependent_job.report", generation.id, depends_on=generation.id)
        worker = SimpleWorker([reports], connection=redis, serializer=JSONSerializer)
        worker.work(max_jobs=1, logging_level="WARNING")
        print(second.return_value())


if __name__ == "__main__":
    main()
