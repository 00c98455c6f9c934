"""lm-evaluation-harness, unmodified, gets mlx-lm's log-likelihoods from the gateway.

Install it with ``pip install torch==2.13.0 'lm_eval[api]' transformers``, in any environment whose
``lm_eval`` is on the path.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import redis

from omlx_worker.engine.loading.checkpoint import DEMO, resolve
from omlx_worker.queue.embedded import free_port
from tests.helpers.decoding import Loaded
from tests.helpers.gateway import is_healthy
from tests.helpers.redis_server import redis_server
from tests.helpers.workers import wait_for

HARNESS = shutil.which("lm_eval")
pytestmark = [
    pytest.mark.system,
    pytest.mark.timeout(300),
    pytest.mark.skipif(HARNESS is None, reason="lm_eval is not on the path"),
]

DOCS = [
    {"context": "def double(x):\n    return", "choices": [" x * 2", " y + 7", " None"]},
    {"context": "for item in items:\n    print(", "choices": ["item)", "other)", "7)"]},
    {"context": "import", "choices": [" os", " 17", " return"]},
]
TASK = """
task: omlx_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {docs}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{context}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a gateway beside a worker with the demo model."""
    port = free_port()
    command = [sys.executable, "-c", "from omlx_worker.cli import main; main()", "run"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with redis_server() as server, redis.Redis.from_url(server.url) as connection:
        process = subprocess.Popen(
            [*command, "-m", "demo", "--redis-url", server.url, "--http", str(port)],
            env=environment,
        )
        try:
            wait_for(lambda: is_healthy(port, process) and connection.exists("omlx:models"), 120)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(60)


def likelihood(context: str, choice: str) -> tuple[float, bool]:
    """Of a choice after a context, split as the harness does, and whether it is the likeliest."""
    demo = Loaded.demo()
    before, whole = (demo.tokenizer.encode(text) for text in (context, context + choice))
    rest = whole[len(before) :]
    logits = demo.network(mx.array([before + rest]))[0].astype(mx.float32)
    logits = logits[len(before) - 1 : -1]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    own = mx.take_along_axis(logprobs, mx.array(rest)[:, None], axis=-1).sum().item()
    return float(own), logits.argmax(axis=-1).tolist() == rest


@pytest.mark.parametrize(("size", "concurrent"), [(1, 1), (4, 2)])
def test_a_task_of_the_harness_gets_mlx_lms_log_likelihoods(
    url: str, tmp_path: Path, size: int, concurrent: int
) -> None:
    docs = tmp_path / "docs.jsonl"
    docs.write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "task.yaml").write_text(TASK.format(docs=docs))
    where = f"base_url={url}/v1/completions,tokenizer={resolve(DEMO)}"
    arguments = {
        "--model": "local-completions",
        "--model_args": f"model=demo,{where},num_concurrent={concurrent}",
        "--batch_size": str(size),
        "--include_path": str(tmp_path),
        "--tasks": "omlx_choices",
        "--output_path": str(tmp_path / "out"),
    }
    alone = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")}
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [HARNESS, "run", *(part for pair in arguments.items() for part in pair)]
    subprocess.run([*command, "--log_samples"], env={**environment, **alone}, check=True)

    [found] = (tmp_path / "out").rglob("samples_*.jsonl")
    samples: list[dict[str, Any]] = [json.loads(line) for line in found.read_text().splitlines()]
    assert [sample["doc"] for sample in samples] == DOCS
    for sample in samples:
        for choice, [(logprob, greedy)] in zip(
            sample["doc"]["choices"], sample["resps"], strict=True
        ):
            own, likeliest = likelihood(sample["doc"]["context"], choice)
            assert float(logprob) == pytest.approx(own, abs=1e-4)
            assert greedy == str(likeliest)
